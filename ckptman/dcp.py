"""torch's distributed checkpoint: `StorageWriter` and `StorageReader` for it, and `adopt` for what it wrote."""

from ckptman.engine.dcp.adopt import adopt as adopt
from ckptman.engine.dcp.storage import StorageReader as StorageReader
from ckptman.engine.dcp.storage import StorageWriter as StorageWriter

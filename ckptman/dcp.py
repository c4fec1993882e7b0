"""torch's distributed checkpoint: `StorageWriter` and `StorageReader` for it, and `adopt` for what it wrote."""

from ckptman.engine.dcp.storage import StorageReader as StorageReader
from ckptman.engine.dcp.storage import StorageWriter as StorageWriter
from ckptman.tools.adopt.adopt import adopt as adopt

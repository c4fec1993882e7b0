"""torch's distributed checkpoint: `StorageWriter` and `StorageReader` for it, and `adopt` for what it wrote."""

from ckptman.dcp.adopt import adopt as adopt
from ckptman.dcp.storage import StorageReader as StorageReader
from ckptman.dcp.storage import StorageWriter as StorageWriter

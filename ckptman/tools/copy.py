"""`copy`: checkpoints to another root."""

from __future__ import annotations

import os
from pathlib import Path

from ckptman._tracebacks import short_traceback
from ckptman.errors import NotFoundError
from ckptman.policies.parameters import check_count
from ckptman.storage.catalog.backends.backend import open_backend
from ckptman.storage.catalog.catalog import Catalog, Entry
from ckptman.storage.format.paths import check_is_no_checkpoint
from ckptman.storage.transfer.copy import Copied, CopyOptions, copy_checkpoint
from ckptman.storage.transfer.progress import Limit
from ckptman.tools.prune_and_pin import entry_at


@short_traceback
def copy(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    every: bool = False,
    overwrite: bool = False,
    threads: int | None = None,
    bytes_per_second: float | None = None,
) -> list[Copied]:
    """Copy a checkpoint to another root, and read every byte back before it counts there.

    Interrupted, it resumes when it is called again. A copy keeps its name, step and sequence. One that is there already
    is not copied again.

    Args:
        source: A checkpoint, the path of one, or a root (then its newest checkpoint).
        destination: The root to copy to, or `s3://bucket/prefix`.
        every: Copy all complete checkpoints of the root `source`, oldest commit first.
        overwrite: Replace another checkpoint of the same step, or a damaged copy.
        threads: Threads that move bytes.
        bytes_per_second: Move no more than this.

    Returns:
        The result for each checkpoint.

    Raises:
        NotFoundError: There is no such checkpoint.
        CorruptError: The source is damaged.
        ExistsError: Another checkpoint of the same step is there.
        BusyError: Another copy is writing it.
        RootError: The destination cannot be written.
        ConfigError: One is inside the other.
    """
    if threads is not None:
        check_count("copy", "threads", threads)
    limit = None if bytes_per_second is None else Limit(bytes_per_second)
    options = CopyOptions(threads=threads, limit=limit, overwrite=overwrite)
    entries = _complete(Path(source)) if every else [entry_at(source)]
    place = open_backend(os.fspath(destination))
    return [copy_checkpoint(entry, place, options) for entry in entries]


def _complete(root: Path) -> list[Entry]:
    check_is_no_checkpoint(root)
    found = Catalog(root).complete()
    if not found:
        raise NotFoundError(f"{root} holds no complete checkpoint: ckptman list says what is there")
    return found

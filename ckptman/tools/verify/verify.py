"""`verify` as a function."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ckptman._tracebacks import short_traceback
from ckptman.errors import ConfigError, NotFoundError
from ckptman.policies.parameters import check_count
from ckptman.storage.catalog.catalog import Catalog, any_will_do, look_at_folder
from ckptman.storage.catalog.reader_lease import held
from ckptman.storage.catalog.root_checks import check_is_folder
from ckptman.storage.format.foreign import recognize
from ckptman.storage.format.paths import is_checkpoint
from ckptman.tools.verify import check
from ckptman.tools.verify.reports import VerifyReport

MOST_LOADED = 2**13


@short_traceback
def verify(
    path: str | os.PathLike[str],
    *,
    world_sizes: Sequence[int] = (),
    allow: Sequence[str] = (),
    threads: int | None = None,
) -> VerifyReport:
    """Prove that every byte of a checkpoint is what was saved, and on request that it loads.

    The result is noted beside the checkpoint: `Checkpoint.verified` and retention rules know of it.

    Args:
        path: A checkpoint, the path of one, or a root (then the one that was committed last, damaged or not). Also what
            plain DCP or torchtitan wrote.
        world_sizes: Also load it with each of these numbers of processes, and compare with what was saved.
        allow: Classes that may be unpickled, as "module.Class".
        threads: Threads that read.

    Returns:
        The report: `good` if all that was asked for is proved; else `problems`, `damage`, `refused` and `not_tried` say
        why not. A damaged checkpoint is no error.

    Raises:
        NotFoundError: There is no such checkpoint.
        RootError: The root cannot be read.
    """
    if threads is not None:
        check_count("verify", "threads", threads)
    for size in world_sizes:
        check_count("verify", "world_sizes", size)
    if max(world_sizes, default=1) > MOST_LOADED:
        raise ConfigError(f"verify: more than {MOST_LOADED:,} ranks are not loaded, which would take hours")
    folder = _newest_at(path)
    wishes = check.Wishes(world_sizes=list(world_sizes), allow=tuple(allow), threads=threads)
    if (other := recognize(folder)) is not None:
        report = check.check_foreign(other, wishes)
        check.check_fit(report, wishes)
        return report
    entry = look_at_folder(folder)
    with held(folder, what="verify"):
        report = check.check_bytes(entry, wishes)
        check.check_fit(report, wishes)
        check.remember(report, entry)
    return report


def _newest_at(path: str | os.PathLike[str]) -> Path:
    """Return the checkpoint that is meant: of a root that which was committed last, whatever is known to be wrong with
    it."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ConfigError(f"path is a checkpoint, the path of one, or a root, not {path!r}")
    check_is_folder(os.fspath(path))
    folder = Path(path)
    if is_checkpoint(folder) or recognize(folder) is not None:
        return folder
    found = Catalog(folder).look(until=any_will_do)
    if not found:
        raise NotFoundError(f"{folder} is not a checkpoint, and holds none: name the directory of one step, or a root")
    return found[-1].path

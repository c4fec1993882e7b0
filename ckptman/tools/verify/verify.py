"""`verify` as a function."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ckptman._tracebacks import short_traceback
from ckptman.catalog.catalog import look_at
from ckptman.catalog.reader_lease import reading
from ckptman.format.foreign import recognize
from ckptman.format.paths import parse_step
from ckptman.run import checkpoint_at
from ckptman.tools.verify import check
from ckptman.tools.verify.reports import VerifyReport


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
        path: A checkpoint, the path of one, or a root (then its newest checkpoint). Also what plain DCP or torchtitan
            wrote.
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
    folder = checkpoint_at(path)
    wishes = check.Wishes(world_sizes=list(world_sizes), allow=tuple(allow), threads=threads)
    if (other := recognize(folder)) is not None:
        report = check.check_foreign(other, wishes)
        _finish(report, wishes)
        return report
    named = parse_step(folder.resolve().name)
    entry = look_at(folder, named.step if named else None)
    with reading(folder, what="verify"):
        report = check.check_bytes(entry, wishes)
        check.check_worth(report, entry, check.neighbours([entry], every=False))
        _finish(report, wishes)
        check.remember(report, entry)
    return report


def _finish(report: VerifyReport, wishes: check.Wishes) -> None:
    if report.is_checked:
        for _ in check.check_fit(report, wishes):
            pass

"""`ckptman pin PATH --why TEXT` and `ckptman unpin PATH`: what no rule may delete."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING, Annotated

from ckptman.cli import console
from ckptman.cli.options import option
from ckptman.cli.select import PathOrRoot, Step, choose
from ckptman.errors import CorruptError, NotFoundError, RootError

if TYPE_CHECKING:
    from ckptman.catalog.catalog import Entry

Why = Annotated[str, option("--why", "TEXT", "Why it is to stay. Required.")]


def pin(path: PathOrRoot, why: Why, step: Step = None) -> None:
    """Keep a checkpoint, whatever the rules of a prune say.

    PATH is one checkpoint, or a root: then it is that of --step, or the newest finite one. The pin is a file beside the
    manifest, and goes with every copy of the checkpoint. Pinned again, it gets the new reason.
    """
    from ckptman.catalog import pins
    from ckptman.catalog.verified import read_verified
    from ckptman.io.durable_files import DISK

    entry = _entry(path, step)
    note = read_verified(entry.path, entry.require_manifest())
    if note is not None and note.damaged:  # no rule deletes it, but whoever pins it counts on it
        raise CorruptError(f"{entry.path} is damaged ({note.damaged}): pin another step")
    try:
        pins.pin(entry.path, why, by=console.user_at_host(), time_seconds=time.time(), disk=DISK)
    except OSError as error:
        raise _refused(entry, error, "pinned") from error
    console.say(f"Pinned step {entry.step}: {console.plain(why.strip())}")


def unpin(path: PathOrRoot, step: Step = None) -> None:
    """Let the rules of a prune decide about a checkpoint again."""
    from ckptman.catalog import pins
    from ckptman.io.durable_files import DISK

    entry = _entry(path, step)
    try:
        was = pins.unpin(entry.path, DISK)
    except OSError as error:
        raise _refused(entry, error, "unpinned") from error
    console.say(f"Step {entry.step} is no longer pinned." if was else f"Step {entry.step} was not pinned.")


def _entry(path: PathOrRoot, step: int | None) -> Entry:
    (entry,) = choose(path, step)
    entry.require_manifest()
    return entry


def _refused(entry: Entry, error: OSError, done: str) -> Exception:
    if isinstance(error, FileNotFoundError):
        return NotFoundError(
            f"{entry.path} was deleted meanwhile, so it cannot be {done}: ckptman list shows what is left"
        )
    return RootError(
        error.errno or errno.EIO,
        f"{entry.path} cannot be {done} ({error.strerror}): check the permissions of its folder, and the quota",
    )

"""What a copy writes: a checkpoint on its way into a backend, which nobody sees before all of it was read back."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from ckptman.errors import BusyError, RootError
from ckptman.storage.catalog.backends.copy_source import Reading
from ckptman.storage.io.file_writer import Sink


class Incoming(Protocol):
    """A file on its way into a draft."""

    name: str
    size_bytes: int
    is_remote: bool
    """Whether it comes through a network."""

    def pass_to(self, sink: Sink, threads: int) -> None:
        """Write all of it, from its beginning, flush it, and hold it against what was saved.

        Raises: CorruptError (it is something else), SourceError, what the sink raises.
        """


class CopyDraft(Protocol):
    """A checkpoint on its way into a backend. The next copy of the same checkpoint takes the files that are whole.

    Called in this order: `difference`, `claimed`, `tidy`, `put` for each file, `publish`. Each raises OSError and
    CkptmanError.
    """

    where: str
    """What it will be, for messages."""
    draft: str
    """What it is meanwhile, for messages."""
    in_place: bool
    """Whether files are put as a whole and under their final names: then what has the name goes first."""
    is_remote: bool
    """Whether it goes through a network: then one thread puts a file, and several wait for it at a time."""

    def difference(self) -> str | None:
        """Compare what has the name with what is to be copied, by names and sizes.

        Returns: None: nothing has it. "": it is this very checkpoint. Otherwise why it is not, in words.
        """

    def may_replace(self) -> bool:
        """Whether what has the name is a checkpoint, or what is left of one."""

    def target_is_abandoned(self) -> bool:
        """Whether what has the name gives it up without being asked: a rollback left it behind."""

    def is_verified(self) -> bool:
        """Whether it was noted that every byte of what has the name was read back."""

    def note_verified_copy(self) -> None:
        """Note that every byte of what has the name was read back."""

    def settle(self) -> Sequence[str]:
        """Finish what is there already: nothing else is left to do. Return remarks for people."""

    def claimed(self, replace: bool) -> AbstractContextManager[None]:
        """Have the draft alone until the block ends. Raises: BusyError, ExistsError."""

    def tidy(self) -> dict[str, int]:
        """Clear it of what has no place in it, and return the files that have their size already, with that.

        Raises: OSError also where all of it will not fit.
        """

    def put(self, file: Incoming, threads: int) -> None:
        """Write a file from its beginning, checked and durable. Called by several threads at a time.

        Raises: CorruptError: what came is not what was saved.
        """

    def uncache(self, names: Iterable[str], *, final: bool, flush: bool) -> bool:
        """Have files read from storage the next time. True where some may still come from memory.

        `final`: those of what has the name, and not those of the draft. `flush`: that may not have been done.
        """

    def open(self, name: str, *, final: bool) -> Reading:
        """Open a file for reading. Raises: CorruptError (it is none, or has another size), OSError."""

    def publish(self, replace: bool) -> str:
        """Give it its manifest, and make it visible as a whole, durably. Return where it is."""

    def abandon(self) -> None:
        """Remove it. Never raises."""


class NotReadBackError(RootError):
    """Storage does not give back what was written to it. Attributes: `draft`, `problems`."""

    def __init__(self, draft: Path | str, problems: tuple[str, ...]) -> None:
        self.draft, self.problems = draft, problems
        super().__init__(
            errno.EIO,
            f"{draft} does not give back what was written to it ({'; '.join(problems[:3])}), so the copy does not "
            f"count: copy again, which writes these files once more; if it comes again, do not trust this storage",
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.draft, self.problems)


class BusyCopyingError(BusyError):
    """Another copy to the same place is at work. That says nothing about other checkpoints."""

    def __init__(self, root: str, host: str, pid: int, job_id: str | None, text: str = "") -> None:
        super().__init__(root, host, pid, job_id)
        job = f", job {job_id}" if job_id else ""
        usual = (
            f"another copy of the same checkpoint to {root} is at work (host {host}, pid {pid}{job}): let it end, "
            f"then there is nothing left to do"
        )
        self.args = (text or usual,)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.root, self.host, self.pid, self.job_id, *self.args)

"""What a copy writes: a checkpoint on its way into a backend, which nobody sees before all of it was read back."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from ckptman.errors import BusyError, RootError
from ckptman.storage.catalog.backends.source import Done, Finish


class Writing(Protocol):
    """One file that is being written, from several threads."""

    buffered_because: str
    """Why a large file did not go by direct I/O alone; "" where it did."""

    def write(self, data: memoryview, offset: int, scratch: memoryview) -> None:
        """Write a piece. `scratch`: where it may lie, with room for whole pages. Raises: OSError."""

    def finish(self) -> None:
        """Make the file durable: all its pieces were written. Raises: OSError."""

    def close(self) -> None:
        """Let go of the file; of one that was not finished nothing need stay."""


class CopyDraft(Protocol):
    """A checkpoint on its way into a backend. The next copy of the same checkpoint goes on where this one ended.

    Called in this order: `difference`, `claimed`, `tidy`, `writer` or `put_in_order` for each file, `publish`. Each
    raises OSError and CkptmanError.
    """

    where: str
    """What it will be, for messages."""
    draft: str
    """What it is meanwhile, for messages."""
    in_place: bool
    """Whether files are put as a whole and under their final names: then what has the name goes first."""
    in_order: bool
    """Whether a file can be put only from its first byte to its last: by `put_in_order`, and not by `writer`."""
    writers: int
    """As many threads write to it where nobody says otherwise; 0: as many as a save has."""

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
        """Clear it of what has no place in it, and return the files that an attempt before left, with their sizes.

        Raises: OSError also where all of it will not fit.
        """

    def piece_bytes(self) -> int:
        """How much is best written at once."""

    def writer(self, name: str, size: int) -> Writing:
        """Open one of its files for writing."""

    def put_in_order(self, name: str, pieces: Callable[[], Iterator[memoryview]]) -> None:
        """Write one of its files from front to back. `pieces`: asked anew where the file has to be begun anew."""

    def scan(
        self, sizes: Mapping[str, int], *, final: bool, finish: Finish, threads: int | None, done: Done
    ) -> Sequence[str]:
        """Read files and digest their blocks. Return what was written to meanwhile, in words.

        `sizes`: how many bytes of each. `final`: those of what has the name, and not those of the draft.
        """

    def uncache(self, *, final: bool) -> bool:
        """Have its files read from storage the next time. True where some may still come from memory."""

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
            f"count: copy again, which writes what is wrong once more; if it comes again, do not trust this storage",
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

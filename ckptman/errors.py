"""What can go wrong, one class per cause and one exit code per class of remedy.

    CkptmanError                       1   something that has no better name
    ├── ConfigError (ValueError)       2   wrong usage or configuration
    │   ├── UnknownKeyError            2   a configuration key that does not exist; the known ones are listed
    │   └── IntervalError              2   an interval, count or factor that cannot be (negative, zero, NaN)
    ├── NotFoundError (FileNotFoundError)  3   no such root, step or path
    ├── CorruptError                   4   bytes, sizes or a manifest are not what was saved
    │   └── SuspectError               4   a run crashed twice at the same step after loading it
    ├── ExistsError (FileExistsError)  5   something is already there and is not overwritten
    ├── CommitError                    6   a save did not become durable; names the rank and its cause
    ├── MismatchError                  7   the checkpoint does not fit the model, or does not reshard
    ├── SchedulerError                 8   Slurm or the local scheduler refused
    ├── FormatVersionError             9   written by a newer ckptman
    ├── RootError (OSError)           10   the root is no folder, or cannot be read or written
    ├── BusyError                     11   another run that is alive writes to this root
    └── RankLostError                 12   another rank of this run is gone, or was silent for too long

Three codes have no class: 13 means that the watchdog ended a process that was stuck, where nothing can be raised any
more; 75 (EX_TEMPFAIL) means saved, run me again; 128 + n means killed by signal n.
Every class pickles, because errors cross ranks, and carries its data as attributes. The text of each is safe to print:
what came from a checkpoint or a path is in it with escapes where a terminal would obey.
"""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from types import FrameType

EXIT_OK = 0
EXIT_AGAIN = 75
"""EX_TEMPFAIL of sysexits.h: the run saved, and wants to be started again."""
EXIT_STALLED = 13
"""The watchdog ended this process: it made no progress."""

_MANY = 8
"""From this many names with a common parent on, a message shows the parent and a count."""

# Control characters, marks that change the direction of text, line separators, and bytes that are no text at all.
_UNSAFE = "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
_ONE_LINE = re.compile(_UNSAFE)
_LINES = re.compile(rf"(?!\n ){_UNSAFE}")


def plain(text: object) -> str:
    """Text that came from a checkpoint or a path, with each unsafe character written as an escape such as `\\x1b`."""
    return _ONE_LINE.sub(_escape, str(text))


def plain_lines(text: object) -> str:
    """Return the same for a whole message. Indented lines stay, as our lists are: none passes for another message."""
    return _LINES.sub(_escape, str(text).expandtabs(4))


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


_HIDDEN = "***"
_IN_ADDRESSES = (
    # `https://user:word@host`; a name alone is no secret but in addresses of the web.
    (re.compile(r"(?i)(\b[a-z][a-z0-9+.-]*:/{1,3})[^\s/@:]*:(?!\d+/)[^\s@]+(?:@[^\s/@]+)*@"), rf"\1{_HIDDEN}@"),
    (re.compile(r"(?i)(\bhttps?:/{1,2})[^\s/@]+@"), rf"\1{_HIDDEN}@"),
    (re.compile(r"(?i)(\bs3:)[^\s/@:]*:[^\s@]+@"), rf"\1{_HIDDEN}@"),
    (
        re.compile(r"(?i)([?&][^\s=&]*(?:secret|password|token|credential|signature|sig|key)=)[^\s'\"&#]+"),
        rf"\1{_HIDDEN}",
    ),
)
_SECRET = r"(?:secret|passw(?:or)?d|pwd|(?:api|access|account|private|shared|auth)[_-]?key)"
_QUOTED = r"""(?:'[^'\r\n]+'|"[^"\r\n]+"|[^\s'"&,;)]+)"""
_RANDOM = r"(?=[^\s'\"]*[0-9])(?=[^\s'\"]*[A-Za-z])[^\s'\"&,;)]{12,}"
"""What looks drawn at random: a number, or a word, is no token."""
_SECRETS = (
    *_IN_ADDRESSES,
    # `Authorization: Bearer ...`, whatever kind it is, to the end of the line or of the text in quotes.
    (re.compile(r"(?i)(\b(?:proxy-)?authorization['\"]?\s*[:=]\s*['\"]?)[^'\"\r\n]+"), rf"\1{_HIDDEN}"),
    (re.compile(r"(?i)(\bbearer\s+)[\w.~+/=-]{8,}"), rf"\1{_HIDDEN}"),
    # `"password": "..."`, `PASSWORD='...'`, `HF_TOKEN=...`; and `session_token: ...`, where it can be one.
    (re.compile(rf"(?i)({_SECRET}(?:['\"]?\s*=|['\"]\s*:|:\s)\s*){_QUOTED}"), rf"\1{_HIDDEN}"),
    (re.compile(rf"(\b[A-Z0-9_]*(?:TOKEN|CREDENTIALS?)=){_QUOTED}"), rf"\1{_HIDDEN}"),
    (re.compile(rf"(?i)((?:token|credentials?|signature|sig)['\"]?\s*[=:]\s*['\"]?){_RANDOM}"), rf"\1{_HIDDEN}"),
    # Keys that are known by how they begin.
    (re.compile(r"\b(A[KS]IA)[0-9A-Z]{16}\b"), rf"\1{_HIDDEN}"),
    (re.compile(r"\b(hf_|gh[opsur]_|npm_)[A-Za-z0-9]{20,}"), rf"\1{_HIDDEN}"),
    (re.compile(r"\b(github_pat_|glpat-|AIza|xox[abprs]-)[A-Za-z0-9_-]{16,}"), rf"\1{_HIDDEN}"),
    (re.compile(r"\b(sk-)(?=[\w-]*[A-Z])(?=[\w-]*[0-9])[\w-]{20,}"), rf"\1{_HIDDEN}"),
    (re.compile(r"\b(eyJ)[\w-]{8,}\.[\w-]{8,}\.[\w-]+"), rf"\1{_HIDDEN}"),
    (re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----)[\s\S]*?(?=-----END|\Z)"), rf"\1{_HIDDEN}"),
)


def masked(text: str) -> str:
    """Return the text with what looks like a secret replaced by `***`: for what is written where others read it."""
    return _replaced(text, _SECRETS)


def masked_address(address: str) -> str:
    """Return an address with the credentials in it replaced by `***`. Words in its path are none."""
    return _replaced(address, _IN_ADDRESSES)


def _replaced(text: str, patterns: Iterable[tuple[re.Pattern[str], str]]) -> str:
    for pattern, instead in patterns:
        text = pattern.sub(instead, text)
    return text


def warn(text: str) -> None:
    """Warn, safe to print, and name the line outside of ckptman that led here; in a background thread there is none."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _module_of(frame) == "ckptman":
        frame, level = frame.f_back, level + 1
    if _module_of(frame) == "threading":
        warnings.warn_explicit(plain_lines(text), RuntimeWarning, "ckptman", 1)
    else:
        warnings.warn(plain_lines(text), RuntimeWarning, stacklevel=level)


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def warn_only(text: str) -> None:
    """Warn, and go on where warnings are errors: that must neither undo a save nor keep a rank from the others."""
    with contextlib.suppress(Warning):
        warn(text)


class CkptmanError(Exception):
    """The root of every error that ckptman raises on purpose.

    Its message says what is wrong, where, and what to do.

    Attributes:
        exit_code: What a command, or `Checkpointer.exit_code`, ends with for this class.
    """

    exit_code = 1
    raised_from: tuple[BaseException | None, BaseException | None] | None = None
    of_program = False
    """Whether an object of the program raised what this was raised from: its frames say where."""

    def __reduce__(self) -> tuple[object, ...]:
        # What it was raised from may not pickle, and is of this process alone.
        attributes = {name: value for name, value in vars(self).items() if name != "raised_from"}
        return *super().__reduce__()[:2], attributes

    def __str__(self) -> str:
        return plain_lines(super().__str__())


class ConfigError(CkptmanError, ValueError):
    """Wrong usage or configuration. Correct the call, the option or the file that the message names."""

    exit_code = 2


class UnknownKeyError(ConfigError):
    """A configuration key that does not exist. Use one of those that are listed.

    Args:
        key: The key as the user wrote it (dotted).
        known: The keys that are allowed in its place.
        where: The file or section that has it.

    Attributes:
        key, known, where: As given.
    """

    def __init__(self, key: str, known: Sequence[str], where: str = "") -> None:
        self.key, self.known, self.where = key, tuple(known), where
        place = f" in {where}" if where else ""
        super().__init__(f"unknown key {key!r}{place}; known keys: {', '.join(sorted(self.known))}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.key, self.known, self.where)


class IntervalError(ConfigError):
    """An interval, a count or a factor that cannot be: negative, zero or not a number. Give a positive one."""


class NotFoundError(CkptmanError, FileNotFoundError):
    """No such root, step or path. Check its name; `ckptman list ROOT` shows what is there."""

    exit_code = 3


class CorruptError(CkptmanError):
    """Bytes, sizes or a manifest are not what was saved.

    Restore an older checkpoint, or bring this one back from a copy; `ckptman verify` shows what is damaged.
    """

    exit_code = 4


class SuspectError(CorruptError):
    """What was saved is what is there, but a run crashed twice at the same step after loading it.

    Restore an older checkpoint, or this one once more with `allow_suspect=True`.
    """


class ExistsError(CkptmanError, FileExistsError):
    """Something is already there, and ckptman does not overwrite it. Choose another name, or move it away."""

    exit_code = 5


_OF_THE_STATE = ("TypeError", "AttributeError", "PicklingError", "NotImplementedError", "RecursionError")
"""What is raised by values that cannot be written; no disk raises it."""


class CommitError(CkptmanError):
    """A save did not become durable. What was committed before is untouched, and the run can save again.

    Remove the cause (a full disk, a quota, a value that cannot be written); the next save starts afresh.

    Args:
        step: Optimizer steps completed when it was saved.
        rank: The rank whose failure it was; -1 where that is not known.
        cause: The error of that rank as text.

    Attributes:
        step, rank, cause: As given.
    """

    exit_code = 6

    def __init__(self, step: int, rank: int, cause: str) -> None:
        self.step, self.rank, self.cause = step, rank, cause
        who = f"rank {rank}" if rank >= 0 else "a rank that cannot be named"
        found = re.match(r"(?:\w+\.)*(\w+): ", cause)
        remedy = "remove the cause (disk full? quota? a dead node?)"
        if found is not None and found[1] in _OF_THE_STATE:
            remedy = "take it out of the state, or make plain values of it,"
        elif found is not None and found[1] == FloatingPointError.__name__:
            remedy = 'go back to one of them with restore(), or say nonfinite="keep" to save such a state with a mark,'
        super().__init__(
            f"the save of step {step} failed on {who}: {cause}. Earlier checkpoints are untouched; {remedy} and the "
            f"next save starts afresh."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.step, self.rank, self.cause)


class MismatchError(CkptmanError):
    """The checkpoint does not fit what it is to be loaded into. Raised before any byte is copied.

    Accept what is missing or unexpected by the call that the message ends with, bring the state in line with what was
    saved, or restore another checkpoint; `ckptman show` lists its tensors.

    Args:
        where: The checkpoint.
        missing: Names that are wanted and were not saved.
        unexpected: Names that were saved and are not wanted.
        mismatched: Lines with both shapes or types side by side. That cannot be accepted.
        subject: What differs, such as "the model and the value 'epoch'".
        call: The call that accepts what is missing and unexpected; "" where there is none.
        hint: What else would help; "" if nothing is known.

    Attributes:
        where, missing, unexpected, mismatched, subject, call, hint: As given.
    """

    exit_code = 7

    def __init__(
        self,
        where: str,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Sequence[str] = (),
        subject: str = "the state",
        call: str = "",
        hint: str = "",
    ) -> None:
        self.where, self.subject, self.call, self.hint = where, subject, call, hint
        self.missing, self.unexpected, self.mismatched = tuple(missing), tuple(unexpected), tuple(mismatched)
        lines = [f"{where} does not fit this run; nothing was loaded"]
        for title, names in (
            ("missing in the checkpoint", self.missing),
            ("unexpected in the checkpoint", self.unexpected),
            ("different", self.mismatched),
        ):
            if names:
                lines.append(f"  {title} ({len(names)}):")
                lines += [f"    {plain(name)}" for name in (names if title == "different" else _by_parents(names))]
        if hint:
            lines.append(f"  {plain(hint)}.")
        if self.mismatched:
            lines.append(
                "  Differences in shape or dtype cannot be accepted. To start that part afresh, give it a new name."
            )
        elif call:
            kept = "keep what is missing as it is here" if self.missing else ""
            left = "leave what is unexpected there" if self.unexpected else ""
            lines.append(f"  To {' and '.join(filter(None, (kept, left)))}: {plain(call)}")
        lines.append(
            f"  Bring {plain(subject)} in line with what was saved, or restore another checkpoint "
            f"(ckptman show lists its tensors)."
        )
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        given = (self.where, self.missing, self.unexpected, self.mismatched, self.subject, self.call, self.hint)
        return type(self), given


def _by_parents(names: Sequence[str]) -> list[str]:
    """Return names for a message; many with a common parent, such as the settings of a parameter, become one line."""
    counts = Counter(name.rpartition(".")[0] for name in names)
    many = {parent: f"{parent}.* ({count})" for parent, count in counts.items() if parent and count >= _MANY}
    return [*dict.fromkeys(many.get(name.rpartition(".")[0], name) for name in names)]


class SchedulerError(CkptmanError):
    """Slurm or the local scheduler refused, or cannot be reached. Remove the cause that is named, and try again."""

    exit_code = 8


class FormatVersionError(CkptmanError):
    """Written by a newer ckptman. Upgrade ckptman, or name an older step.

    Args:
        where: The file.
        found: The format version that it has.
        known: The newest version that this ckptman reads.

    Attributes:
        where, found, known: As given.
    """

    exit_code = 9

    def __init__(self, where: str, found: object, known: int) -> None:
        self.where, self.found, self.known = where, found, known
        super().__init__(
            f"{where} has format version {found}, and this ckptman reads up to {known}: "
            f"upgrade ckptman (pip install -U ckptman), or name an older step"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.where, self.found, self.known)


class RootError(CkptmanError, OSError):
    """The checkpoint root is no folder, or cannot be read or written. Never taken for "no checkpoints yet".

    Check the mount and its permissions. `errno` and `strerror` are those of the system.
    """

    exit_code = 10


class BusyError(CkptmanError):
    """Another run that is alive writes to this root. Stop that one first, or give this run a root of its own.

    Args:
        root: The checkpoint root.
        host: The host of the run that has it.
        pid: Its process there.
        job_id: Its Slurm job, or None.
        own: Whether it is the very process that asked: a Checkpointer of before is still open.

    Attributes:
        root, host, pid, job_id, own: As given.
    """

    exit_code = 11

    def __init__(self, root: str, host: str, pid: int, job_id: str | None, own: bool = False) -> None:
        self.root, self.host, self.pid, self.job_id, self.own = root, host, pid, job_id, own
        job = f", job {job_id}" if job_id else ""
        text = (
            f"{root} is being written to by another run (host {host}, pid {pid}{job}): "
            f"stop that one first, or give this run a root of its own"
        )
        if own:
            text = (
                f"{root} is being written to by this very process (pid {pid}): a Checkpointer that was made before, by "
                f"a notebook cell that runs again perhaps, is still open. Call close() on it, or use it in a `with` "
                f"block, and then make the next"
            )
        super().__init__(text)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.root, self.host, self.pid, self.job_id, self.own)


class RankLostError(CkptmanError):
    """Another rank of this run is gone, or silent for longer than the timeout.

    The log of that rank says why. Start the run again: it goes on from its newest checkpoint.

    Args:
        cause: What was seen.

    Attributes:
        cause: As given.
    """

    exit_code = 12

    def __init__(self, cause: str) -> None:
        self.cause = cause
        super().__init__(
            f"another rank is gone, or was silent for longer than the timeout: {cause}. The log of that rank says why; "
            f"start the run again, and it goes on from its newest checkpoint"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.cause,)

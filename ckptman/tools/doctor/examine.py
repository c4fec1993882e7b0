"""What a directory's file system promises and delivers, tried out: the checks of `ckptman doctor DIR`.

Each check runs in a process of its own with a time limit, so a file system that hangs cannot hang the doctor. The
checks work in one directory of their own inside the examined one; it is removed at the end, and nothing else changes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ckptman.errors import CkptmanError, ConfigError, NotFoundError, RootError
from ckptman.policies.intervals import seconds_text
from ckptman.storage.io.durable_files import DISK
from ckptman.storage.io.failure_cause import FULL
from ckptman.storage.io.isolated_process import Died, NoAnswer, run_isolated
from ckptman.storage.io.mount import find_mount, mount_number, read_mounts
from ckptman.tools.doctor import filesystem_checks, mount_checks, renames, second_client, speed
from ckptman.tools.doctor.finding import Check, Finding, Place, Verdict, found, size_text, why
from ckptman.tools.doctor.second_client import HERE, Second

SIZE_BYTES = 256 * 1024 * 1024
TIMEOUT_SECONDS = 60.0
OVERHEAD = 0.05
"""The share of the time that saves may block training."""
FILES_OF_SAVE = 6
"""A save of one process makes and flushes data, block digests, index, chunk table, .metadata and manifest."""
FOLDERS_OF_SAVE = 2
"""A commit flushes the checkpoint before it gets its name, and the root after it."""
LEAST_SECONDS = 0.001
"""Shorter times are not measured."""
MOST_SECONDS = 900.0
"""A run should save at least so often: HKUST, training of a 7B model, 2024."""
PREFIX = ".ckptman-doctor-"
REPEAT_SECONDS = 1.0
_REMOVE_SECONDS = 10.0
_SHARE_OF_TIMEOUT = 1 / 6
"""No check has more than four parts."""
_HUNG = "the file system does not answer any more"
_PER_NODE = "at the rate of this node alone: with more nodes give the share of one, and share the file system's limit"
_REFUSED = {
    errno.EROFS: "read-only: nothing can be saved",
    errno.EACCES: "this user may not write here: nothing can be saved",
    errno.EPERM: "this user may not write here: nothing can be saved",
}


def check_writable(place: Place) -> Finding:
    """Make the directory of the checks."""
    left = sorted(path.name for path in Path(place.path).glob(f"{PREFIX}*"))
    DISK.make_folder(place.own)
    if not left:
        return found("ok", "yes")
    advice = "of a doctor that was killed: remove it by hand (or it is at work right now)"
    return found("warning", f"yes; there is {', '.join(left)}", advice)


CHECKS: tuple[Check[Place], ...] = (
    Check("file system", mount_checks.check_kind),
    Check("space", mount_checks.check_space),
    Check("quota", mount_checks.check_quota),
    Check("writable", check_writable, "nothing can be saved here"),
    Check("other clients", second_client.check_clients),
    Check("rename", partial(renames.check, renames.COMMITS), "commits are not safe here"),
    Check("replace", partial(renames.check, renames.REPLACEMENTS), "nothing can be noted here"),
    Check("fsync", filesystem_checks.check_sync, "nothing that is saved here is durable"),
    Check("claim", filesystem_checks.check_claim, "two runs could write to one root"),
    Check("locks", filesystem_checks.check_locks, "locks cannot be relied on"),
    Check("direct I/O", filesystem_checks.check_direct),
    Check("reserve", filesystem_checks.check_reserve),
    Check("small files", speed.check_small_files),
    Check("write", speed.check_write),
    Check("read", speed.check_read),
)
_CORE = ("writable", "rename", "replace", "fsync", "claim")
"""Saves rely on these: one that ends without a result FAILED."""
Note = Callable[[str], None]


def examine(
    folder: Path,
    *,
    size_bytes: int = SIZE_BYTES,
    against_bytes: int | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    second_command: Sequence[str] = (),
    note: Note = lambda name: None,
) -> list[Finding]:
    """Examine the file system of a directory. `note` gets the name of each check before it begins.

    `size_bytes` bounds each test of bandwidth. `against_bytes` is the size of a checkpoint. `second_command` starts a
    process on another client of the file system.
    Raises: NotFoundError (no such directory), RootError (a file, or not readable), ConfigError (the command starts no
    process).
    """
    part_seconds = timeout_seconds * _SHARE_OF_TIMEOUT
    place = Place(
        path=os.path.abspath(folder),  # noqa: PTH100
        own=Path(),
        mount=find_mount(read_mounts(), os.path.abspath(folder)),  # noqa: PTH100
        second=Second(tuple(second_command)),
        size_bytes=size_bytes,
        against_bytes=against_bytes,
        repeat_seconds=min(REPEAT_SECONDS, part_seconds),
        part_seconds=part_seconds,
    )
    try:
        place.path, number = _find(folder, timeout_seconds)
    except (NoAnswer, Died) as error:
        place.over = _HUNG
        consequence = "a run that saves or restores here would hang, too"
        kind = replace(mount_checks.check_kind(place), name="file system")
        return [kind, Finding("answer", "FAILED", f"{folder} {error}", consequence)]
    place.mount = find_mount(read_mounts(), place.path, number)
    place.own = Path(place.path) / f"{PREFIX}{os.urandom(4).hex()}"
    with _cleaned_up(place, timeout_seconds):
        for check in CHECKS:
            note(check.name)
            if place.over:
                row: Finding | None = Finding(check.name, "unknown", f"not tried: {place.over}")
            else:
                row = _try(check, place, timeout_seconds)
            if row is not None:
                place.found[check.name] = row
            if check.name == "quota":
                place.size_bytes = min(size_bytes, speed.most_bytes(place.found))
            elif check.name == "writable" and place.found["writable"].verdict not in ("ok", "warning"):
                break
            elif check.name == "other clients":
                host = row.figures.get("host", "") if row is not None and row.verdict == "ok" else ""
                place.second = replace(place.second, host=host) if host else HERE
    return [*place.found.values(), *bill(place.found, against_bytes)]


def _find(folder: Path, timeout_seconds: float) -> tuple[str, int | None]:
    """Return the path of the directory without links, and the number of its mount."""

    def look() -> tuple[str, int | None]:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return os.path.realpath(folder), mount_number(fd)
        finally:
            os.close(fd)

    try:
        return run_isolated(look, timeout_seconds)
    except FileNotFoundError as error:
        raise NotFoundError(f"there is no folder {folder}: make it first, or name one that is there") from error
    except NotADirectoryError as error:
        raise RootError(errno.ENOTDIR, f"{folder} is a file, not a folder: name a folder") from error
    except OSError as error:
        message = f"{folder} cannot be read ({why(error)}): check the mount and its permissions"
        raise RootError(error.errno or errno.EIO, message) from error


def _try(check: Check[Place], place: Place, timeout_seconds: float) -> Finding | None:
    """Run a check in a process of its own, and turn any error into a finding."""
    try:
        row = run_isolated(lambda: check.run(place), timeout_seconds)
    except NoAnswer as error:
        place.over = _HUNG
        row = found("FAILED", str(error), "a run would hang here, too, until it is killed")
    except ConfigError:
        raise
    except OSError as error:
        if error.errno in FULL:
            _note_full(place, error)
            row = found("unknown", f"not tried to its end: {place.over}")
        else:
            row = found("FAILED", why(error), _REFUSED.get(error.errno or 0, check.consequence))
    except CkptmanError as error:
        row = found("FAILED", str(error), check.consequence)
    except Exception as error:  # noqa: BLE001 (a check that goes wrong is told, and the others are done)
        value = str(error) if isinstance(error, Died) else f"{type(error).__name__}: {error}"
        if check.name in _CORE:
            row = found("FAILED", value, "it was not found out: run doctor again")
        else:
            row = found("unknown", value)
    return None if row is None else replace(row, name=check.name)


def _note_full(place: Place, error: OSError) -> None:
    """Report a full disk or quota at its own row: the check that met it has not failed."""
    place.over = "there is no room"
    whose, advice = ("quota", "the quota is used up") if error.errno == errno.EDQUOT else ("space", "the disk is full")
    before = place.found.get(whose, Finding(whose, "unknown", ""))
    value = "; ".join(filter(None, [before.value if before.verdict != "unknown" else "", why(error)]))
    place.found[whose] = Finding(whose, "FAILED", value, f"{advice}: nothing can be saved", before.figures)


@contextmanager
def _cleaned_up(place: Place, timeout_seconds: float) -> Iterator[None]:
    """Remove the directory of the checks at the end, whatever happens, and report it if that fails."""

    def remove() -> bool:
        if os.path.lexists(place.own):  # else it was never made, and a read-only mount would refuse
            DISK.remove_tree(place.own)
        return not os.path.lexists(place.own)

    try:
        yield
    finally:
        try:
            # This goes on if this process is killed meanwhile, or asked a second time to stop.
            is_gone = run_isolated(remove, min(_REMOVE_SECONDS, timeout_seconds), outlive=True)
        except (NoAnswer, Died, OSError):
            is_gone = False
        if not is_gone or place.over == _HUNG:
            # A process that hangs while it makes the directory may finish when the file system is back.
            value = "the folder of the checks may be there, or come back with the file system"
            verdict: Verdict = "warning" if is_gone else "FAILED"
            place.found["clean-up"] = Finding("clean-up", verdict, value, f"see that {place.own} is gone")


def bill(findings: Mapping[str, Finding], against_bytes: int | None) -> list[Finding]:
    """Return the cost of a checkpoint of that size at the measured rates: a save, a load, and the save interval.

    Whatever its size, a save makes and flushes files and directories one after the other, and a load opens the files.
    """
    figures = {name: each.figures for name, each in findings.items()}
    if against_bytes is None or "bytes_per_second" not in figures.get("write", {}):
        return []
    files, sync = figures.get("small files", {}), figures.get("fsync", {})
    made, opened = files.get("create_per_second"), files.get("stat_per_second")
    file_seconds = max(1 / made if made else 0.0, sync.get("file_seconds") or 0.0)
    making = FILES_OF_SAVE * file_seconds + FOLDERS_OF_SAVE * (sync.get("folder_seconds") or 0.0)
    rows = [_cost("save", figures["write"], against_bytes, making, _PER_NODE)]
    if "bytes_per_second" in figures.get("read", {}):
        opening = FILES_OF_SAVE / opened if opened else 0.0
        rows.append(_cost("load", figures["read"], against_bytes, opening, ""))
    save_seconds = rows[0].figures["seconds"]
    interval = save_seconds / OVERHEAD
    blocking, background = (seconds_text(max(LEAST_SECONDS, each)) for each in (interval, save_seconds))
    value = f"at least {blocking} where saves block training, for {OVERHEAD * 100:.0f} % of the time"
    value += f"; {background} where they are made in the background"
    verdict: Verdict = "ok" if interval <= MOST_SECONDS else "slow"
    advice = ""
    if verdict == "slow":
        advice = f"a run should save every {MOST_SECONDS / 60:.0f} min: save in the background"
        too_long = " and to a faster tier: one save takes longer than that"
        advice += too_long if save_seconds > MOST_SECONDS else ", or to a faster tier"
    seconds = {"blocking_seconds": interval, "background_seconds": save_seconds, "overhead": OVERHEAD}
    return [*rows, Finding("interval", verdict, value, advice, seconds)]


def _cost(name: str, measured: Mapping[str, Any], size_bytes: int, fixed_seconds: float, advice: str) -> Finding:
    """Return what so many bytes cost at a measured rate; a warning if that is not the rate of a checkpoint."""
    seconds = size_bytes / measured["bytes_per_second"] + fixed_seconds
    doubts: list[str] = measured.get("doubts", [])
    spent = seconds_text(seconds) if seconds >= LEAST_SECONDS else f"less than {seconds_text(LEAST_SECONDS)}"
    value = f"{size_text(size_bytes)} in {spent}" + (f" ({', '.join(doubts)})" if doubts else "")
    return Finding(
        name, "warning" if doubts else "ok", value, advice, {"seconds": seconds, "fixed_seconds": fixed_seconds}
    )

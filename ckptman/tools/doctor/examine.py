"""What a folder's file system promises and gives, tried out: the checks of `ckptman doctor DIR`, one after the other.

Each runs in a process of its own and has a limit: a file system that hangs is left alone after it. They work in one
folder of their own inside the one that is examined; it is removed at the end, whatever happens, and nothing else is
touched.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ckptman.errors import CkptmanError, ConfigError, NotFoundError, RootError
from ckptman.policies.intervals import seconds_text
from ckptman.runtime.deadline import run_command
from ckptman.storage.io.durable_files import DISK, Disk
from ckptman.storage.io.failure_cause import FULL
from ckptman.storage.io.isolated_process import Died, NoAnswer, run_isolated
from ckptman.tools.doctor import filesystem_checks, mount, quota, renames, second_client, speed
from ckptman.tools.doctor.finding import Finding, Verdict, size_text, why
from ckptman.tools.doctor.mount import family_of
from ckptman.tools.doctor.second_client import HERE, Second

SIZE_BYTES = 256 * 1024 * 1024
TIMEOUT_SECONDS = 60.0
SHARE_OF_FREE = 0.05
"""A test of bandwidth takes no more of what is free than this. The small files of the others are under 1 MB."""
LEAST_BYTES = 1024 * 1024
OVERHEAD = 0.05
"""How much of the time saves that block training may take."""
FILES_OF_SAVE = 6
"""What a save of one process makes and flushes: data, digests of blocks, index, chunk table, .metadata, manifest."""
FOLDERS_OF_SAVE = 2
"""Flushed by a commit: the checkpoint before it gets its name, and the root after it."""
LEAST_SECONDS = 0.001
"""Nothing here is known to less."""
MOST_SECONDS = 900.0
"""A run should save at least so often: HKUST, training of a 7B model, 2024."""
PREFIX = ".ckptman-doctor-"
_RESERVE_BYTES = 8 * 1024 * 1024
_REMOVE_SECONDS = 10.0
_COMMAND_SECONDS = 5.0
_SPEED_SECONDS = 10.0
_SHARE_OF_TIMEOUT = 1 / 6
"""No check has more than four parts."""
REPEAT_SECONDS = 1.0
"""For how long the checks that try something again and again do so."""
_HUNG = "the file system does not answer any more"
_CORE = ("writable", "rename", "replace", "fsync", "claim")
"""What saves build on: good only when it was tried to its end."""

_PER_NODE = "at the rate of this node alone: with more nodes give the share of one, and share the file system's limit"

Note = Callable[[str], None]


def examine(
    folder: Path,
    *,
    size_bytes: int = SIZE_BYTES,
    against_bytes: int | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    second_command: Sequence[str] = (),
    note: Note = lambda name: None,
    disk: Disk = DISK,
) -> list[Finding]:
    """Examine the file system of a folder. `note` is told the name of each check before it begins.

    `size_bytes` bounds what is written at a time, besides small files; less where little is free. `against_bytes`: of
    a checkpoint. `second_command` starts a process on another client of the file system.
    Raises: NotFoundError (no such folder), RootError (it is a file, or cannot be read), ConfigError (the command starts
    no such process).
    """
    checks = _Checks(timeout_seconds, note)
    run = partial(run_command, timeout_seconds=min(_COMMAND_SECONDS, checks.share_seconds))
    try:
        path, number = _find(folder, timeout_seconds)
    except (NoAnswer, Died) as error:
        kind = mount.check_kind(mount.find_mount(mount.read_mounts(), os.path.abspath(folder)), os.environ)  # noqa: PTH100
        consequence = "a run that saves or restores here would hang, too"
        return [kind, Finding("answer", "FAILED", f"{folder} {error}", consequence)]
    mounted = mount.find_mount(mount.read_mounts(), path, number)

    def check_kind() -> Finding:
        stripes = quota.ask(run, "lfs", "getstripe", "-d", path) if mounted and mounted.kind == "lustre" else ""
        return mount.check_kind(mounted, os.environ, stripes)

    checks.do("file system", check_kind)
    free = _check_room(checks, path, mounted, against_bytes, run)
    size = min(size_bytes, int(SHARE_OF_FREE * free)) // 4096 * 4096
    with _own_folder(checks, Path(path), disk) as own:
        if own is not None:
            shared = family_of(mounted).shared if mounted else None
            second = _check_clients(checks, own, Second(tuple(second_command)), shared, disk)
            _check_promises(checks, own, size, mounted, second, disk)
            in_memory = mounted is not None and family_of(mounted) is mount.MEMORY
            _check_speed(checks, own, size, in_memory, disk)
    return [*checks.found, *bill(checks.found, against_bytes)]


def bill(found: Sequence[Finding], against_bytes: int | None) -> list[Finding]:
    """Return what a checkpoint of that size costs at the rates found: a save, a load, and the interval it allows.

    Whatever its size, a save makes and flushes files and folders, one after the other, and a load looks at the files.
    """
    measured = {each.name: each for each in found if each.figures.get("bytes_per_second")}
    if against_bytes is None or "write" not in measured:
        return []
    making, looking = _fixed_seconds(found)
    save = _cost("save", measured["write"], against_bytes, making, _PER_NODE)
    rows = [save, _cost("load", measured["read"], against_bytes, looking, "")] if "read" in measured else [save]
    save_seconds: float = save.figures["seconds"]
    interval = save_seconds / OVERHEAD
    figures = {"blocking_seconds": interval, "background_seconds": save_seconds, "overhead": OVERHEAD}
    blocking, background = (seconds_text(max(LEAST_SECONDS, each)) for each in (interval, save_seconds))
    value = f"at least {blocking} where saves block training, for {OVERHEAD * 100:.0f} % of the time"
    value += f"; {background} where they are made in the background"
    if interval <= MOST_SECONDS:
        return [*rows, Finding("interval", "ok", value, "", figures)]
    advice = f"a run should save every {MOST_SECONDS / 60:.0f} min: save in the background"
    if save_seconds > MOST_SECONDS:
        advice += " and to a faster tier: one save takes longer than that"
    else:
        advice += ", or to a faster tier"
    return [*rows, Finding("interval", "slow", value, advice, figures)]


def _fixed_seconds(found: Sequence[Finding]) -> tuple[float, float]:
    """Return what a save and a load take besides their bytes, as far as it was measured."""
    figures = {each.name: each.figures for each in found}
    files, sync = figures.get("small files", {}), figures.get("fsync", {})
    made, looked = files.get("create_per_second"), files.get("stat_per_second")
    file_seconds = max(1 / made if made else 0.0, sync.get("file_seconds") or 0.0)
    making = FILES_OF_SAVE * file_seconds + FOLDERS_OF_SAVE * (sync.get("folder_seconds") or 0.0)
    return making, FILES_OF_SAVE / looked if looked else 0.0


def _cost(name: str, measured: Finding, size_bytes: int, fixed_seconds: float, advice: str) -> Finding:
    """So many bytes at a rate that was measured; a warning where that is not the rate of a checkpoint."""
    seconds = size_bytes / measured.figures["bytes_per_second"] + fixed_seconds
    doubts: list[str] = measured.figures.get("doubts", [])
    spent = seconds_text(seconds) if seconds >= LEAST_SECONDS else f"less than {seconds_text(LEAST_SECONDS)}"
    value = f"{size_text(size_bytes)} in {spent}" + (f" ({', '.join(doubts)})" if doubts else "")
    figures = {"seconds": seconds, "fixed_seconds": fixed_seconds}
    return Finding(name, "warning" if doubts else "ok", value, advice, figures)


class _Checks:
    """Runs checks one after the other and keeps what they found. After one that hung or found no room, no more are."""

    def __init__(self, timeout_seconds: float, note: Note) -> None:
        self.timeout_seconds, self.found = timeout_seconds, list[Finding]()
        self.share_seconds = timeout_seconds * _SHARE_OF_TIMEOUT
        """What a part of a check may take."""
        self.repeat_seconds = min(REPEAT_SECONDS, self.share_seconds)
        self._note = note
        self.over: str | None = None
        """Why nothing more can be tried."""

    def do(self, name: str, check: Callable[[], Finding], consequence: str = "") -> Finding:
        """One check, in a process of its own. `consequence`: of its failure, where the check itself cannot say."""
        self._note(name)
        if self.over:
            found = Finding(name, "unknown", f"not tried: {self.over}")
        else:
            found = self._try(name, check, consequence)
        self.found.append(found)
        return found

    def _try(self, name: str, check: Callable[[], Finding], consequence: str) -> Finding:
        try:
            return run_isolated(check, self.timeout_seconds)
        except NoAnswer as error:
            self.over = _HUNG
            return Finding(name, "FAILED", str(error), "a run would hang here, too, until it is killed")
        except Died as error:
            return _not_done(name, str(error))
        except OSError as error:
            if error.errno in FULL:
                return self._full(name, error)
            return Finding(name, "FAILED", why(error), _remedies.get(error.errno or 0, consequence))
        except ConfigError:
            raise
        except CkptmanError as error:
            return Finding(name, "FAILED", str(error), consequence)
        except Exception as error:  # noqa: BLE001 (a check that goes wrong is told, and the others are done)
            return _not_done(name, f"{type(error).__name__}: {error}")

    def _full(self, name: str, error: OSError) -> Finding:
        """Report a full disk or quota as a finding of its own: a check that found no room has not failed."""
        self.over = "there is no room"
        whose, advice = ("quota", _QUOTA_USED_UP) if error.errno == errno.EDQUOT else ("space", _DISK_FULL)
        before = next((each for each in self.found if each.name == whose), Finding(whose, "unknown", ""))
        value = "; ".join(filter(None, [before.value if before.verdict != "unknown" else "", why(error)]))
        full = Finding(whose, "FAILED", value, advice, before.figures)
        self.found = [full if each is before else each for each in self.found]
        if full not in self.found:
            self.found.append(full)
        return Finding(name, "unknown", f"not tried to its end: {self.over}")


def _not_done(name: str, why_not: str) -> Finding:
    if name in _CORE:
        return Finding(name, "FAILED", why_not, "it was not found out: run doctor again")
    return Finding(name, "unknown", why_not)


_DISK_FULL = "the disk is full: nothing can be saved"
_QUOTA_USED_UP = "the quota is used up: nothing can be saved"
_remedies = {
    errno.EROFS: "read-only: nothing can be saved",
    errno.EACCES: "this user may not write here: nothing can be saved",
    errno.EPERM: "this user may not write here: nothing can be saved",
}


def _find(folder: Path, timeout_seconds: float) -> tuple[str, int | None]:
    """Return the path of the folder without links, and the number of its mount."""

    def look() -> tuple[str, int | None]:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return os.path.realpath(folder), mount.mount_number(fd)
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


def _check_room(
    checks: _Checks, path: str, mounted: mount.Mount | None, against_bytes: int | None, run: quota.Run
) -> int:
    """Space and quota; the bytes that are free for us."""
    space = checks.do("space", lambda: mount.check_space(os.statvfs(path), against_bytes))
    free: int = space.figures.get("free_bytes", 0)
    if mounted is None:
        return free

    def ask() -> Finding:
        found = quota.quotas(path, mounted, run, os.getuid(), Path(path).stat().st_gid)
        return quota.check_quota(found, against_bytes)

    told = checks.do("quota", ask).figures.get("quotas", [])
    left: list[int | None] = [each["left_bytes"] for each in told]
    return min([free, *(each for each in left if each is not None)])


def _check_clients(checks: _Checks, own: Path, second: Second, shared: bool | None, disk: Disk) -> Second:
    """Return the second client with its host name, or this host if it is the same one or does not see our files."""
    found = checks.do("other clients", lambda: second_client.check_clients(own, second, shared, disk))
    good = second.is_elsewhere and found.verdict == "ok"
    return Second(second.command, found.figures["host"]) if good else HERE


def _check_promises(
    checks: _Checks, own: Path, size: int, mounted: mount.Mount | None, second: Second, disk: Disk
) -> None:
    unsafe = mount.unsafe_sync(mounted)

    def sync() -> Finding:
        found = filesystem_checks.check_sync(own, disk, checks.repeat_seconds)
        if unsafe is None or found.verdict == "FAILED":
            return found
        return Finding(found.name, "warning", found.value, unsafe, found.figures)

    reserve_bytes = min(_RESERVE_BYTES, max(size, 4096))
    half = checks.repeat_seconds / 2
    checks.do("rename", lambda: renames.check_rename(own, disk, half, second), "commits are not safe here")
    checks.do("replace", lambda: renames.check_replace(own, disk, half, second), "nothing can be noted here")
    checks.do("fsync", sync, "nothing that is saved here is durable")
    checks.do("claim", lambda: filesystem_checks.check_claim(own, disk, second), "two runs could write to one root")
    checks.do("locks", lambda: filesystem_checks.check_locks(own, second), "locks cannot be relied on")
    checks.do("clock", lambda: filesystem_checks.check_clock(own, disk))
    checks.do("direct I/O", lambda: filesystem_checks.check_direct(own, disk))
    checks.do("reserve", lambda: filesystem_checks.check_reserve(own, reserve_bytes, disk))
    checks.do("links", lambda: filesystem_checks.check_links(own))


def _check_speed(checks: _Checks, own: Path, size: int, in_memory: bool, disk: Disk) -> None:
    limit = min(_SPEED_SECONDS, checks.share_seconds)
    checks.do("small files", lambda: speed.check_small_files(own, checks.repeat_seconds, disk))
    if size < LEAST_BYTES:
        share = f"{SHARE_OF_FREE * 100:.0f} % of what is known to be free"
        little = f"not measured: {share} is less than {size_text(LEAST_BYTES)}"
        checks.found += [Finding(name, "unknown", little) for name in ("write", "read")]
        return
    written = checks.do("write", lambda: speed.check_write(own, size, limit, disk))
    if "bytes_per_second" in written.figures or checks.over:
        checks.do("read", lambda: speed.check_read(own, size, limit, in_memory))
    else:
        checks.found.append(Finding("read", "unknown", "not tried: nothing could be written"))


@contextmanager
def _own_folder(checks: _Checks, folder: Path, disk: Disk) -> Iterator[Path | None]:
    """A folder for the checks, removed at the end; None where none can be made, which is found then."""
    own = folder / f"{PREFIX}{os.urandom(4).hex()}"

    def make() -> Finding:
        left = sorted(path.name for path in folder.glob(f"{PREFIX}*"))
        disk.make_folder(own)
        if not left:
            return Finding("writable", "ok", "yes")
        advice = "of a doctor that was killed: remove it by hand (or it is at work right now)"
        return Finding("writable", "warning", f"yes; there is {', '.join(left)}", advice)

    try:
        made = checks.do("writable", make, "nothing can be saved here")
        yield own if made.verdict in ("ok", "warning") else None
    finally:
        gone = _is_gone(own, disk, min(_REMOVE_SECONDS, checks.timeout_seconds))
        if not gone or checks.over == _HUNG:
            # A process that hangs in the middle of making it may end that when the file system is back.
            value = "the folder of the checks may be there, or come back with the file system"
            verdict: Verdict = "warning" if gone else "FAILED"
            checks.found.append(Finding("clean-up", verdict, value, f"see that {own} is gone"))


def _is_gone(own: Path, disk: Disk, limit_seconds: float) -> bool:
    """Remove a folder. It goes on even if this process is killed meanwhile, or asked a second time to stop."""

    def remove() -> bool:
        if os.path.lexists(own):  # else it was never made, and a mount that is read-only would refuse to remove it
            disk.remove_tree(own)
        return not os.path.lexists(own)

    try:
        return run_isolated(remove, limit_seconds, outlive=True)
    except (NoAnswer, Died, OSError):
        return False

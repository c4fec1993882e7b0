"""`adopt`: what plain DCP or torchtitan wrote becomes a checkpoint of ckptman, where it is.

No byte of the original files changes. What ckptman needs besides is put beside them: digests, chunk table, index, and
last the manifest, which makes it a checkpoint. Until then nothing that is there counts, and what is there is what the
next attempt would write: a killed one can be run again, and goes on with the same bytes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckptman._tracebacks import short_traceback
from ckptman.engine.loading.box_reader import BoundedState
from ckptman.engine.loading.checkpoint_reader import SavedState
from ckptman.errors import ConfigError, CorruptError, ExistsError, NotFoundError, RootError, plain
from ckptman.storage.format.foreign import recognize, step_in
from ckptman.storage.format.manifest import Manifest, read_manifest
from ckptman.storage.format.paths import MANIFEST, METADATA, parse_data, parse_half_written, parse_step, step_folder
from ckptman.storage.io.durable_files import DISK, holding
from ckptman.storage.io.file_scan import Stamp, stamp_of
from ckptman.storage.io.safe_open import read_regular
from ckptman.tools.adopt.describe import REASON, describe, placed
from ckptman.tools.verify.foreign_check import ForeignReport, check_foreign

_SHOWN = 5
_OURS = re.compile(r"(?:blocks-[0-9]{5,}(?:-[0-9]+)?\.bin|chunks\.bin|index\.json|manifest\.json)", re.ASCII)


@dataclass(frozen=True)
class Adopted:
    """A checkpoint that was adopted. `files`, `bytes`: what of it was there before; of those, `checked_bytes` have a
    correct checksum."""

    path: Path
    step: int
    sequence: int
    files: int
    bytes: int
    checked_bytes: int
    remarks: tuple[str, ...] = ()


@short_traceback
def adopt(
    path: str | os.PathLike[str],
    step: int | None = None,
    *,
    keep_name: bool = False,
    done: Callable[[int], None] | None = None,
) -> Adopted:
    """Make a checkpoint that plain DCP or torchtitan wrote one of ckptman, where it is.

    Its folder is renamed to the name of its step, so that it counts among the checkpoints of its root.

    Args:
        path: The folder of the checkpoint.
        step: Its step, if the name of the folder does not tell it, as `step-1000` does.
        keep_name: Do not rename the folder. Then it is a checkpoint for whoever names it.
        done: Called with the bytes that were read, from several threads. Each file is read twice.

    Returns:
        What it became.

    Raises:
        NotFoundError: There is no checkpoint.
        ExistsError: It is one of ckptman already, another has its step, or a file is in the way.
        CorruptError: It is damaged or incomplete, holds a link, or a pickle of something else.
        ConfigError: The step is not known, or it is a checkpoint of the HF Trainer or a file of Lightning.
        OSError: Reading or writing failed. After any error the folder is as it was; if only the rename failed, it
            is as `keep_name` leaves it.
    """
    folder = Path(os.path.abspath(path))  # noqa: PTH100 a link stays one
    if folder.is_symlink():
        raise ConfigError(f"{folder} is a link: name the folder that it leads to, which is the one that is changed")
    if not folder.exists():
        raise NotFoundError(f"there is no {folder}: check the path, and the mount")
    other = recognize(folder)
    if other is not None and not other.is_dcp:
        name = "step-<10 digits>" if other.step is None else step_folder(other.step)
        raise ConfigError(
            f"{folder} is a checkpoint of {other.writer}, and only those of plain DCP are adopted: it stays as it is. "
            f"Load it by {other.writer}, and save what you loaded: ckptman.save(state, {name!r})"
        )
    step = _step_of(folder, step)
    final = folder if keep_name else folder.with_name(step_folder(step))
    if not (folder / METADATA).exists():
        raise NotFoundError(
            f"{folder} is not a checkpoint: it has no {METADATA}. DCP writes that last: it may be incomplete"
        )
    with _alone(folder), holding(folder):
        manifest = _manifest_in(folder, step, final)
        _check_free(folder, step, final)
        # Now, and not when everything was read.
        if manifest is None and not os.access(folder, os.W_OK | os.X_OK):
            why = f"{folder} cannot be written to, and files are put beside its own"
            raise RootError(errno.EACCES, f"{why}: check its permissions")
        if final != folder and not os.access(folder.parent, os.W_OK | os.X_OK):
            why = f"{folder.parent} cannot be written to, and the folder would be renamed there"
            raise RootError(errno.EACCES, f"{why}: check its permissions, or say --keep-name")
        report = ForeignReport()
        if manifest is None:
            first = _stamps(folder, [METADATA])
            saved = BoundedState.read(folder)
            saved.refuse_transformed()
            names = _data_names(saved)
            before = first | _stamps(folder, names)
            report = _examine(folder, done)
            files, manifest = describe(saved, names, step, final, done)
            if _stamps(folder, before) != before:
                raise CorruptError(f"{folder} was written to while it was read: adopt it when its writer is done")
            _check_free(folder, step, final)  # that took long, and a run may have saved this step
            _put_beside(folder, files, manifest)
        else:
            _clear_drafts(folder)
            # Under its old name it was none among others, or was for long: they may be others by now.
            if (now := placed(manifest, folder, final)) != manifest:
                manifest = now
                DISK.replace_file(folder / MANIFEST, manifest.to_json())
        if final != folder:
            DISK.rename(folder, final)
            DISK.sync_folder(final.parent)
    counts = (report.files, report.bytes, report.checked_bytes)
    return Adopted(final, manifest.step, manifest.sequence, *counts, tuple(report.remarks))


def candidates(root: Path) -> list[Path]:
    """Return the folders of a root that can be adopted, by step; those whose names tell none come last.

    A folder that cannot be entered is included if its name tells a step. Raises: RootError.
    """
    try:
        found = list(root.iterdir())
    except OSError as error:
        raise RootError(
            error.errno or errno.EIO, f"{root} cannot be read: {error.strerror}; check the mount"
        ) from error
    theirs = [each for each in found if _is_theirs(each)]
    return sorted(theirs, key=lambda each: (step_in(each.name) is None, step_in(each.name) or 0, each.name))


def _is_theirs(folder: Path) -> bool:
    try:
        if folder.is_symlink() or not (folder / METADATA).exists():
            return False
        ours = parse_step(folder.name)
        return ours is None or (ours.kind == "step" and not (folder / MANIFEST).exists())
    except OSError:
        return step_in(folder.name) is not None


def _step_of(folder: Path, step: int | None) -> int:
    named, ours = step_in(folder.name), parse_step(folder.name)
    if ours is not None and (ours.kind != "step" or step not in (None, named)):
        what = "to a folder that is not a checkpoint yet, or no longer"
        if ours.kind == "step":
            what = f"not that of step {step}"
        raise ConfigError(f"{folder.name} is a name that ckptman gives, {what}: rename it first")
    if step is None and named is None:
        raise ConfigError(f"{folder}: its name tells no step, as step-1000 does: name the step with --step")
    found = step if step is not None else named
    assert found is not None
    step_folder(found)  # refuses what is none
    return found


def _manifest_in(folder: Path, step: int, final: Path) -> Manifest | None:
    """Return the manifest of a checkpoint that was adopted but not renamed; None if there is none. Raises:
    ExistsError."""
    try:
        manifest = read_manifest(folder)
    except FileNotFoundError:
        return None
    if manifest.reason != REASON or final == folder:
        raise ExistsError(f"{folder} is a checkpoint of ckptman already (step {manifest.step})")
    if manifest.step != step:
        raise ExistsError(f"{folder} was adopted as step {manifest.step}: say --step {manifest.step} to rename it")
    return manifest


def _check_free(folder: Path, step: int, final: Path) -> None:
    """Raise ExistsError if there is a checkpoint of the step, under its name or standing aside for it."""
    for name in os.listdir(final.parent) if parse_step(final.name) else ():  # noqa: PTH208 names alone are wanted
        other = parse_step(name)
        if name != folder.name and other is not None and other.step == step and other.kind in ("step", "old"):
            there = final.with_name(name)
            raise ExistsError(f"{there} exists already, so {folder.name} cannot be that step: give another --step")


def _data_names(saved: SavedState) -> list[str]:
    """Return the data files by rank and number. Raises: CorruptError if one of them has no name of DCP's."""
    names = {*saved.index.files, *(at.file for at in saved.index.objects.values())}
    for name in sorted(names):
        if parse_data(name) is None:
            raise CorruptError(
                f"{saved.folder} keeps data in {plain(name)}, and DCP itself in files such as __0_0.distcp: load it by "
                f"what wrote it, and save it again by ckptman"
            )
    with os.scandir(saved.folder) as items:
        # A thread of DCP that had nothing to write leaves an empty file. One that is not empty is of an earlier save.
        names |= {item.name for item in items if parse_data(item.name) and not item.stat(follow_symlinks=False).st_size}
    return sorted(names, key=lambda name: parse_data(name) or (0, 0))


def _stamps(folder: Path, names: Iterable[str]) -> dict[str, Stamp]:
    """Return what original files are known by. Raises: CorruptError if one is missing or a link."""
    found = {}
    for name in names:
        try:
            if (folder / name).is_symlink():
                raise CorruptError(f"{folder / name} is a link: copy the checkpoint with what it points to (cp -rL)")
            found[name] = stamp_of(os.lstat(folder / name))
        except FileNotFoundError:
            raise CorruptError(f"{folder}: {name} is missing: bring it back from a copy") from None
    return found


def _examine(folder: Path, done: Callable[[int], None] | None) -> ForeignReport:
    """Check that a checkpoint is complete, as far as plain DCP allows. Raises: CorruptError, RootError."""
    report = check_foreign(folder, done=done)
    if report.problems:
        more = f" (and {len(report.problems) - _SHOWN} more)" if len(report.problems) > _SHOWN else ""
        raise CorruptError(
            f"{folder} is damaged or incomplete: {'; '.join(map(plain, report.problems[:_SHOWN]))}{more}. Bring it "
            f"back from a copy, or adopt another one"
        )
    if report.unread:
        raise RootError(errno.EACCES, f"{folder}: {report.unread[0]}: check its permissions")
    return report


def _put_beside(folder: Path, files: dict[str, bytes], manifest: Manifest) -> None:
    """Write what ckptman needs, and the manifest last. Raises: ExistsError, OSError; then nothing of it is left."""
    _clear_drafts(folder)
    missing = [name for name, data in files.items() if not _is_there(folder / name, data)]
    written: list[Path] = []
    try:
        for name in missing:
            draft = folder / f"{name}.tmp-{os.getpid()}-{os.urandom(4).hex()}"
            written += [draft, folder / name]
            DISK.write_file(draft, files[name])
            DISK.rename(draft, folder / name)
        DISK.sync_folder(folder)
        DISK.replace_file(folder / MANIFEST, manifest.to_json())
    except Exception:
        if not (folder / MANIFEST).exists():
            for path in written:
                with contextlib.suppress(OSError):
                    DISK.remove_file(path)
        raise


def _clear_drafts(folder: Path) -> None:
    """Remove half-written files of an attempt that was killed. No other attempt runs now."""
    for name in os.listdir(folder):  # noqa: PTH208 names alone are wanted
        if parse_half_written(name) is not None and _OURS.match(name):
            DISK.remove_file(folder / name)


def _is_there(path: Path, data: bytes) -> bool:
    """Whether an earlier attempt wrote exactly this. Raises: ExistsError if something else has the name."""
    if not os.path.lexists(path):
        return False
    with contextlib.suppress(CorruptError):
        if read_regular(path, len(data)) == data:
            return True
    raise ExistsError(f"{path} is in the way: ckptman writes a file of that name. Move it away")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes of this host from adopting the same folder. Raises: ExistsError, OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ExistsError(f"{folder} is being adopted by another process already") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(fd)

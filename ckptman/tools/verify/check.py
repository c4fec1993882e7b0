"""`verify`: prove that a checkpoint is what was saved, and that it loads. Each check fills in its part of a report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckptman.errors import CkptmanError, ConfigError, CorruptError
from ckptman.storage.format.paths import METADATA
from ckptman.tools.verify import verify_process
from ckptman.tools.verify.reports import LoadReport, VerifyReport

if TYPE_CHECKING:
    from ckptman.storage.catalog.catalog import Entry
    from ckptman.storage.format.foreign import ForeignCheckpoint
    from ckptman.storage.format.manifest import Manifest

NAMES_TOLD = 3
Progress = Callable[[str, int | None], AbstractContextManager[Callable[[float], None] | None]]


def _show_nothing(what: str, total_bytes: int | None) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class Wishes:
    """What to prove besides the bytes, and how. Bandwidths in bytes per second. `progress` shows how far a check is."""

    world_sizes: Sequence[int] = ()
    mesh: tuple[int, ...] | None = None
    plan_only: bool = False
    bandwidth: float | None = None
    rank_bandwidth: float | None = None
    threads: int | None = None
    allow: tuple[str, ...] = ()
    progress: Progress = _show_nothing


def check_bytes(entry: Entry, wishes: Wishes) -> VerifyReport:
    """Check digests and coverage of an entry, complete or not; without digests where only a plan is asked for."""
    from ckptman.storage.catalog.verified import identify
    from ckptman.storage.format.manifest import missing_file, read_manifest

    report = VerifyReport(entry.step, entry.path, newer_format=entry.newer_format, mesh=wishes.mesh)
    if entry.newer_format is not None:
        return report
    if entry.unreadable is not None:
        report.unread.append(str(entry.unreadable))
        return report
    if entry.manifest is None:
        report.problems.append(entry.problem or "it has no manifest")
        see_whether_it_stayed(report)
        return report
    with _noted_in(report):
        manifest = read_manifest(entry.path)
        report.manifest, report.identity = manifest, identify(entry.path, manifest)
        if entry.problem is not None and entry.problem != missing_file(entry.path, manifest):
            report.problems.append(entry.problem)
            return report
        _check_files(report, manifest, wishes)
        if not report.unread:
            _check_coverage(report, manifest, wishes)
    if entry.nonfinite and report.is_checked:
        report.remarks.append(f"NaN or infinity in {entry.nonfinite}, as it was saved")
    see_whether_it_stayed(report)
    return report


def check_foreign(found: ForeignCheckpoint, wishes: Wishes) -> VerifyReport:
    """Check what plain DCP or torchtitan wrote, as far as it describes itself; needs torch. Nothing else is read."""
    from ckptman.storage.io.file_scan import default_threads
    from ckptman.tools.verify.foreign_check import check_foreign as check_dcp

    report = VerifyReport(None, found.path, written_by=found.writer, mesh=wishes.mesh)
    if not found.is_dcp:
        report.gone = f"it is a checkpoint of {found.writer}, which ckptman cannot check: load it with {found.writer}"
        return report
    begun, threads = time.perf_counter(), wishes.threads or default_threads()
    with _noted_in(report):
        total, _ = found.size_and_time()
        with wishes.progress(str(found.path), total) as done:
            told = check_dcp(found.path, threads, done, open_containers=not wishes.plan_only)
        report.seconds = time.perf_counter() - begun
        report.files, report.bytes, report.tensors = told.files, told.bytes, told.tensors
        report.problems, report.unread, report.checked_bytes = told.problems, told.unread, told.checked_bytes
        report.remarks = [f"not proved: {remark}" for remark in told.remarks]
        if others := [str(each.relative_to(found.path)) for each in found.files() if not _is_of_dcp(each, found.path)]:
            report.remarks.append(f"not proved: {_few(others)}, which DCP does not read")
        if report.is_checked:
            report.levels.append("coverage")
            if not wishes.plan_only:
                _check_pickles(report, wishes)
    return report


def _is_of_dcp(path: Path, folder: Path) -> bool:
    return path.parent == folder and (path.name == METADATA or path.suffix == ".distcp")


@contextmanager
def _noted_in(report: VerifyReport) -> Iterator[None]:
    """Note in the report what ends a check of the bytes."""
    try:
        yield
    except FileNotFoundError:
        report.gone = "it was deleted meanwhile"
    except CorruptError as error:
        report.problems.append(str(error))
    except OSError as error:
        report.unread.append(f"{error.filename or report.path} cannot be read: {error.strerror or error}")


def check_fit(report: VerifyReport, wishes: Wishes) -> None:
    """Load it, or plan to, on each world size that is asked for."""
    if not report.is_checked or not (wishes.world_sizes or wishes.mesh is not None):
        return
    try:
        if wishes.plan_only:
            wanted = (wishes.world_sizes, wishes.bandwidth, wishes.mesh, wishes.rank_bandwidth)
            for plan in verify_process.plan_on(report.path, *wanted):
                report.plans.append(plan)
        else:
            with wishes.progress(f"loading {report.name}", None) as done:
                for found in verify_process.load_on(report.path, wishes.world_sizes, wishes.mesh, done, wishes.allow):
                    _note_load(report, found)
    except CorruptError as error:
        report.problems.append(str(error))
    except (CkptmanError, OSError) as error:
        report.not_tried.append(f"that it loads: {error}")
    see_whether_it_stayed(report)


def _note_load(report: VerifyReport, found: LoadReport) -> None:
    on = f"{found.world_size:,} process{'es' if found.world_size > 1 else ''}"
    report.remarks += [f"on {on} not proved: {note}" for note in found.notes]
    if found.left_out:
        names = _few(found.left_out)
        report.remarks.append(f"on {on} not proved: {names} load, as quantized tensors cannot be sharded")
    if found.not_tried:
        report.not_tried.append(f"that it loads on {on}: {found.not_tried}")
    else:
        report.loads[found.world_size] = found


def remember(report: VerifyReport, entry: Entry) -> None:
    """Note beside the manifest what was proved, or found damaged. If that fails, it is a remark."""
    from ckptman.storage.catalog.verified import forget_verified, note_damaged, note_verified

    if report.identity is None or not (report.is_checked or report.is_damaged):
        return
    try:
        if report.is_damaged:
            note_damaged(entry.path, report.identity, str([*report.damage, *report.problems][0]))
        elif report.problems_of_fit:
            forget_verified(entry.path)
        else:
            loaded = [size for size, found in report.loads.items() if found.is_proof]
            note_verified(
                entry.path,
                report.identity,
                levels=report.levels,
                world_sizes=[size for size in loaded if report.mesh_of(size) is None],
                meshes=[mesh for size in loaded if (mesh := report.mesh_of(size)) is not None],
                plan_world_sizes=[plan.world_size for plan in report.plans],
            )
    except OSError as error:
        what = "that it was verified" if report.is_verified else "that it is damaged, and no longer verified,"
        where = f"{error.filename or entry.path}: {error.strerror or error}"
        report.remarks.append(f"{what} could not be noted: {where}")


def see_whether_it_stayed(report: VerifyReport) -> None:
    """Take back all findings if a run deleted the checkpoint, or saved it again, while it was read."""
    from ckptman.storage.catalog.reader_lease import is_gone
    from ckptman.storage.catalog.verified import identify

    if report.gone is not None:
        return
    unread: list[str] = []
    deleted = "it was deleted while it was verified"
    try:
        if is_gone(report.path):
            report.gone = deleted
        elif report.manifest is not None and identify(report.path, report.manifest) != report.identity:
            report.gone = "its files changed while it was verified: verify it once more"
    except FileNotFoundError:
        report.gone = deleted
    except OSError as error:
        report.gone = f"its manifest cannot be read any more ({error.strerror or error}): check the mount"
        unread = [report.gone]  # it need not be gone, and the exit code must not say so
    if report.gone is not None:
        report.damage, report.problems, report.unread, report.levels = [], [], unread, []
        report.loads, report.plans, report.not_tried, report.refused = {}, [], [], []


def _check_files(report: VerifyReport, manifest: Manifest, wishes: Wishes) -> None:
    from ckptman.storage.integrity.folder_check import check_sizes, verify_folder

    begun = time.perf_counter()
    if wishes.plan_only:
        files = check_sizes(report.path, manifest)
    else:
        with wishes.progress(f"step {report.step}", manifest.total_bytes) as done:
            files = verify_folder(report.path, manifest, threads=wishes.threads, done=done, processes=True)
    report.seconds = time.perf_counter() - begun
    report.files, report.bytes = files.files, files.bytes
    report.damage, report.unread, report.remarks = list(files.damage), list(files.unread), list(files.remarks)
    if files.good and not wishes.plan_only:
        report.levels.append("digests")


def _check_coverage(report: VerifyReport, manifest: Manifest, wishes: Wishes) -> None:
    from ckptman.storage.format.index import read_index
    from ckptman.storage.integrity.folder_check import check_coverage, only_pickled

    try:
        index = read_index(report.path, manifest)
        report.tensors = len(index.tensors)
        # Where a list of digests is damaged, that has been said already.
        report.problems += check_coverage(report.path, manifest, lists="digests" in report.levels, index=index)
        pickles = report.is_checked and not wishes.plan_only and only_pickled(report.path, manifest, index)
    except CorruptError:
        if report.damage:  # of a file that is known to be damaged nothing more is to be said
            return
        raise
    if report.is_checked:
        report.levels.append("coverage")
    if pickles:
        _check_pickles(report, wishes)


def _check_pickles(report: VerifyReport, wishes: Wishes) -> None:
    """Check in a process with torch whether a load would unpickle what only a pickle holds."""
    try:
        found = verify_process.refused_on(report.path, wishes.allow)
    except (ConfigError, CorruptError):
        raise
    except (CkptmanError, OSError) as error:
        report.not_tried.append(f"that what is pickled in it loads: {error}")
        return
    report.refused = found["refused"]
    if quantized := found["quantized"]:
        report.remarks.append(f"{_few(quantized)}: quantized, and loaded only into tensors of the same scales")


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_TOLD} more" if len(names) > NAMES_TOLD else ""
    return ", ".join(names[:NAMES_TOLD]) + more

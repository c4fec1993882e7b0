"""`ckptman verify PATH`: prove that every byte is what was saved, and that it loads on any number of processes."""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptman.cli import console
from ckptman.cli.console import progress
from ckptman.cli.options import MOST_THREADS, AsJson, flag, option, parse_numbers, parse_rate
from ckptman.cli.select import PathOrRoot, Step, choose
from ckptman.errors import CkptmanError, ConfigError, CorruptError, MismatchError, NotFoundError, RootError
from ckptman.storage.catalog.reader_lease import GoneError, held
from ckptman.storage.format.foreign import ForeignCheckpoint, foreign_in, recognize
from ckptman.storage.format.paths import METADATA, is_checkpoint

if TYPE_CHECKING:
    from ckptman.storage.catalog.catalog import Entry
    from ckptman.tools.verify.reports import VerifyReport

MOST_RANKS = 2**20
MOST_LOADED = 2**13
PROBLEMS_SHOWN = 40
"""Lines about one checkpoint: a screen. `--json` has all of them."""


def verify(
    path: PathOrRoot,
    step: Step = None,
    every: Annotated[bool, flag("--all", "Of a root: all its checkpoints.")] = False,
    world_size: Annotated[
        str | None,
        option(
            "--world-size",
            "N,N,...",
            "Also load it with each of these numbers of processes, and compare with what was saved.",
        ),
    ] = None,
    mesh: Annotated[str | None, option("--mesh", "RxS", "Also load it as R replicas of S shards (HSDP).")] = None,
    plan_only: Annotated[
        bool,
        typer.Option(
            "--plan-only", help="Read no tensor: only plan the load onto each --world-size, however many ranks."
        ),
    ] = False,
    bandwidth: Annotated[
        str | None,
        option(
            "--bandwidth",
            "SPEED",
            "With --plan-only: what the file system gives to all ranks together, such as 50GB/s.",
        ),
    ] = None,
    rank_bandwidth: Annotated[
        str | None,
        option("--rank-bandwidth", "SPEED", "With --plan-only: what one rank can read at most, such as 2GB/s."),
    ] = None,
    allow: Annotated[
        list[str] | None,
        option(
            "--allow",
            "MODULE.CLASS",
            "A class that may be unpickled, as your script allows it to torch. May be given several times.",
        ),
    ] = None,
    threads: Annotated[
        int | None, option("--threads", "N", "Threads, or processes, that read.", least=1, most=MOST_THREADS)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Prove that every byte is what was saved, and on request that it loads.

    Exit code 0: proved. 4: damaged. 7: it does not load, or not on one of the world sizes. 9: a newer ckptman wrote it.
    10: it could not be read.
    """
    what = f"numbers of processes from 1 to {MOST_RANKS:,}"
    sizes = list(dict.fromkeys(parse_numbers("--world-size", world_size, what, "1,2,4", least=1, most=MOST_RANKS)))
    shape = parse_mesh(mesh)
    if plan_only:
        if not sizes and shape is None:
            raise ConfigError("--plan-only: say onto how many ranks, such as --world-size 1024,4096")
    elif bandwidth or rank_bandwidth:
        raise ConfigError("--bandwidth and --rank-bandwidth are for --plan-only: a load that is made is not estimated")
    elif max([*sizes, math.prod(shape or (1,))]) > MOST_LOADED:
        raise ConfigError(
            f"more than {MOST_LOADED:,} ranks are not loaded, which would take hours: with --plan-only it is told what "
            f"each of them would read, and whether that covers its part"
        )
    in_all = None if bandwidth is None else parse_rate("--bandwidth", bandwidth)
    of_a_rank = None if rank_bandwidth is None else parse_rate("--rank-bandwidth", rank_bandwidth)
    from ckptman.tools.verify import check as checks

    wishes = checks.Wishes(sizes, shape, plan_only, in_all, of_a_rank, threads, tuple(allow or ()), progress)

    def say(lines: list[str]) -> None:
        if lines and not as_json:
            console.say(*lines)

    def judge(report: VerifyReport) -> None:
        """Print what was found of the bytes, then check how it loads, and print that."""
        say(byte_lines(report))
        was_checked = report.is_checked
        checks.check_fit(report, wishes)
        if was_checked:
            say(fit_lines(report))
        reports.append(report)

    reports: list[VerifyReport] = []
    entries, others = _wanted(path, step, every)
    for entry in entries:
        with held(entry.path, what="verify"):
            report = checks.check_bytes(entry, wishes)
            judge(report)
            checks.remember(report, entry)
            say(remark_lines(report))
    for other in others:
        judge(report := checks.check_foreign(other, wishes))
        say(remark_lines(report))
    if as_json:
        console.say_json({"checkpoints": [report.as_dict() for report in reports]})
    say(summary_lines(reports))
    _raise_for(reports)


def _wanted(path: Path, step: int | None, every: bool) -> tuple[list[Entry], list[ForeignCheckpoint]]:
    """Return the checkpoints that are meant, and those of other programs: where there are none of ckptman's, or all.

    Raises: ConfigError, NotFoundError, RootError.
    """
    if step is None and not every and (found := recognize(path)) is not None:
        return [], [found]
    is_root = path.is_dir() and not is_checkpoint(path)
    others = foreign_in(path, os.listdir(path)) if is_root else []  # noqa: PTH208 names alone are wanted
    try:
        return choose(path, step, every, passed_over=True, allow_nonfinite=True), others if every else []
    except GoneError:
        raise
    except NotFoundError:
        if step is not None and others:
            steps = ", ".join(str(each.step) for each in others[-10:] if each.step is not None) or "none"
            others = [each for each in others if each.step == step]
            if not others:
                raise NotFoundError(
                    f"{path} has no checkpoint of step {step}; the steps of other programs there: {steps}"
                ) from None
        if not others and any(path.glob("*.distcp")):
            raise CorruptError(
                f"{path} holds files of DCP and no {METADATA}, which DCP writes last: it was not saved to its end. "
                f"Bring it back from a copy"
            ) from None
        if not others:
            raise
        return [], others if every else others[-1:]


def parse_mesh(written: str | None) -> tuple[int, ...] | None:
    """Parse `2x4` into (2, 4). Raises: ConfigError."""
    if written is None:
        return None
    found = re.fullmatch(r"([1-9][0-9]{0,8})x([1-9][0-9]{0,8})", written)
    if found is None or int(found[1]) * int(found[2]) > MOST_RANKS:
        raise ConfigError(
            f"--mesh: replicas x shards, such as 2x4, no more than {MOST_RANKS:,} ranks in all, not {written!r}"
        )
    return int(found[1]), int(found[2])


def _raise_for(reports: list[VerifyReport]) -> None:
    """End with the worst that was found. Raises: CorruptError, FormatVersionError, RootError, NotFoundError."""
    of = console.count(len(reports), "checkpoint")
    if damaged := [report for report in reports if report.is_damaged]:
        remedy = "A restore skips them; bring them back from a copy, or remove their folders"
        if not any(report.digests for report in damaged):
            remedy = f"Bring {'it' if len(damaged) == 1 else 'them'} back from a copy"
        raise CorruptError(f"{len(damaged)} of {of} damaged or incomplete: {_names(damaged)}. {remedy}")
    if newer := next((report.newer_format for report in reports if report.newer_format), None):
        raise newer
    if stuck := next((report for report in reports if report.problems_of_fit), None):
        if stuck.refused:
            raise _DoesNotLoad(
                f"{stuck.name} holds what no load unpickles, as the lines above say: allow its class (--allow here, "
                f"torch.serialization.add_safe_globals in the script), or save plain values instead"
            )
        if sizes := [str(size) for size, found in stuck.loads.items() if found.problems]:
            what = f"does not load on {', '.join(sizes)} processes as it was saved"
        else:
            sizes = [str(plan.world_size) for plan in stuck.plans if plan.problems]
            what = f"cannot be planned onto {', '.join(sizes)} ranks"
        raise _DoesNotLoad(f"{stuck.name} {what}: see the lines above")
    if unread := [report for report in reports if report.unread or report.not_tried]:
        raise RootError(
            errno.EACCES,
            f"{len(unread)} of {of} could not be read, or not tried: {_names(unread)}. What was asked for is not "
            f"proved: remove the cause that is named above, and verify again",
        )
    if all(report.gone is not None for report in reports):
        raise NotFoundError(f"{_names(reports)}: {reports[0].gone}")


def _names(reports: list[VerifyReport]) -> str:
    return ", ".join(report.name for report in reports)


class _DoesNotLoad(CkptmanError):
    exit_code = MismatchError.exit_code


def byte_lines(report: VerifyReport) -> list[str]:
    """Return the result of the bytes of a checkpoint, with what a load would refuse."""
    lines = _verdict(report)
    if report.refused:
        lines += [f"  {console.paint('does not load', 'red')}", *_told(report.refused, "    ")]
        lines.append("    --allow module.Class proves it for a script that allows it")
    return lines


def _verdict(report: VerifyReport) -> list[str]:
    name = report.name
    if unchecked := report.gone or report.newer_format:
        return [f"{name}: not checked, {unchecked}"]
    if report.is_damaged or report.unread:
        verdict = console.paint("damaged", "red") if report.is_damaged else console.paint("not proved", "yellow")
        problems = [*map(str, report.damage), *report.problems, *(f"not proved: {each}" for each in report.unread)]
        return [f"{name}: {verdict}, {report.path}", *_told(problems)]
    held = f"{console.count(report.files, 'file')}, {console.size(report.bytes)}"
    tensors = console.count(report.tensors, "tensor")
    if not report.digests:
        compared = f"{console.size(report.checked_bytes)} match their checksums"
        what = compared if report.checked_bytes else "changed bytes cannot be found"
        complete = f"; {tensors}, all complete" if "coverage" in report.levels else ""
        return [f"{name}: written by {report.written_by}, without digests: {what}; {held}{complete}"]
    if "digests" in report.levels:
        good = console.paint("good", "green")
        return [f"{name}: {good}, {held}: every byte matches its digest; {tensors}, all complete"]
    return [f"{name}: {held}, of the right sizes; {tensors}, all complete"]


def fit_lines(report: VerifyReport) -> list[str]:
    """Return how a checkpoint loads whose bytes were found to be right, and what could not be tried."""
    if report.gone is not None:
        return [f"  {report.gone}"]
    lines: list[str] = []
    for found in report.loads.values():
        on = console.count(found.world_size, "process", "processes") + _layout(report, found.world_size)
        if found.problems:
            lines += [f"  on {on}: {console.paint('does not load', 'red')}", *_told(found.problems, "    ")]
            continue
        but = f", but for {console.count(len(found.left_out), 'tensor')}" if found.left_out else ""
        lines.append(f"  on {on}: loads, bit for bit what {'was saved' if report.digests else 'is on disk'}{but}")
    for plan in report.plans:
        on = console.count(plan.world_size, "rank") + _layout(report, plan.world_size)
        if plan.problems:
            lines += [f"  on {on}: {console.paint('cannot be planned', 'red')}", *_told(plan.problems, "    ")]
            continue
        files = console.count(plan.files_per_rank_max, "file")
        each = f"at most {console.size(plan.bytes_per_rank_max)} from {files} a rank"
        expected = "" if plan.load_seconds is None else f"; a load takes about {plan.load_seconds:.2g} s"
        lines.append(f"  on {on}: can be planned; {console.size(plan.bytes_total)} in all, {each}{expected}")
        lines += _told(plan.unproved, "    not proved: ")
    lines += _told(report.problems, f"  {console.paint('damaged', 'red')}: ")
    return lines + _told(report.not_tried, f"  {console.paint('not proved', 'yellow')}: ")


def remark_lines(report: VerifyReport) -> list[str]:
    """Return the remarks."""
    return _told(report.remarks, f"  {console.paint('remark', 'yellow')}: ")


def summary_lines(reports: Sequence[VerifyReport]) -> list[str]:
    """Return what was proved of those that are good, level by level, and what was not."""
    good = [report for report in reports if report.is_verified]
    if not good:
        return []
    those = "" if len(good) == len(reports) else f", of {len(good):,} of {len(reports):,} checkpoints"
    ours = [report for report in good if report.digests]
    proved, open_ = [], []
    if any("digests" in report.levels for report in ours):
        proved.append("digests   every byte of every file is the byte that was saved")
    elif ours:
        open_.append("digests   the bytes of the tensors were not read: leave out --plan-only")
    if others := list(dict.fromkeys(report.written_by for report in good if report.written_by)):
        keep = f"{' and '.join(others)} {'keeps' if len(others) == 1 else 'keep'} none"
        open_.append(f"digests   {keep}; only what has a checksum of torch.save was compared")
    if covered := any("coverage" in report.levels for report in good):
        proved.append("coverage  each element of each tensor was saved exactly once")
    replicas = {each.manifest.replicas for each in good if each.manifest is not None and each.manifest.world_size > 1}
    if replicas == {"equal"}:
        proved.append("replicas  what several ranks held was the same on all of them, as their run saw")
    elif "differ" in replicas:
        open_.append("replicas  ranks differed in what they should have alike, and parts of each were saved")
    elif replicas:
        open_.append("replicas  whether ranks held the same where one of them saved for all: nobody compared it")
    loads = {(size, _layout(report, size)) for report in good for size, each in report.loads.items() if each.is_proof}
    if loads:
        what = "was saved" if len(ours) == len(good) else "is on disk"
        proved.append(f"loading   on {_listed(loads)}: processes of their own loaded it, bit for bit what {what}")
    plans = {(plan.world_size, _layout(report, plan.world_size)) for report in good for plan in report.plans}
    if plans:
        proved.append(f"planning  onto {_listed(plans)}: what each rank reads lies in the files, and covers it once")
    if covered and not loads:
        open_.append("loading   on other numbers of processes: --world-size 1,2,8")
    open_.append("meaning   that what was saved was worth saving")
    told = [f"Proved{those}", *_levels(proved)] if proved else []
    return [*told, "Not proved", *_levels(open_)]


def _levels(lines: Sequence[str]) -> list[str]:
    return console.table((), [(line[:8], line[10:]) for line in lines], indent=2)


def _layout(report: VerifyReport, world_size: int) -> str:
    mesh = report.mesh_of(world_size)
    return "" if mesh is None else f" ({' x '.join(map(str, mesh))})"


def _told(lines: Sequence[str], before: str = "  ") -> list[str]:
    """Return a screen of lines, and how many more there are."""
    more = len(lines) - PROBLEMS_SHOWN
    rest = [f"  and {more:,} more: --json lists all of them"] if more > 0 else []
    return [f"{before}{line}" for line in lines[:PROBLEMS_SHOWN]] + rest


def _listed(sizes: Iterable[tuple[int, str]]) -> str:
    """Return world sizes, each with its layout if it has one: `1, 2, 8 (2 x 4)`."""
    return ", ".join(f"{size:,}{layout}" for size, layout in sorted(sizes))

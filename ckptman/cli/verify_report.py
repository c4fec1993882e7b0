"""What `ckptman verify` found out about a checkpoint: for people, and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ckptman.cli import console

if TYPE_CHECKING:
    from ckptman.tools.verify.reports import VerifyReport

PROBLEMS_SHOWN = 40
"""Lines about one checkpoint: a screen. `--json` has all of them."""


def byte_lines(report: VerifyReport) -> list[str]:
    """Return the result of the bytes of a checkpoint, with what a load would refuse."""
    lines = _verdict(report)
    if report.refused:
        lines += [f"  {console.paint('does not load', 'red')}", *_told(report.refused, "    ")]
        lines.append("    --allow module.Class proves it for a script that allows it")
    return lines


def _verdict(report: VerifyReport) -> list[str]:
    name = console.plain(report.name)
    if unchecked := report.gone or report.newer_format:
        return [f"{name}: not checked, {console.plain(unchecked)}"]
    if report.is_damaged or report.unread:
        verdict = console.paint("damaged", "red") if report.is_damaged else console.paint("not proved", "yellow")
        problems = [*map(str, report.damage), *report.problems, *(f"not proved: {each}" for each in report.unread)]
        return [f"{name}: {verdict}, {console.plain(report.path)}", *_told(problems)]
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
        return [f"  {console.plain(report.gone)}"]
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
    return [f"{before}{console.plain(line)}" for line in lines[:PROBLEMS_SHOWN]] + rest


def _listed(sizes: Iterable[tuple[int, str]]) -> str:
    """Return world sizes, each with its layout if it has one: `1, 2, 8 (2 x 4)`."""
    return ", ".join(f"{size:,}{layout}" for size, layout in sorted(sizes))

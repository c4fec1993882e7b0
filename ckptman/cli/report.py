"""`ckptman report ROOT...`: where the hours of runs went."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptman.cli import console
from ckptman.cli.options import AsJson, option, path_argument
from ckptman.errors import ConfigError

if TYPE_CHECKING:
    from ckptman.tools.monitoring.report import RunReport

ATTEMPTS_SHOWN, MOST_REASON = 20, 100


def report(
    roots: Annotated[list[Path], path_argument("ROOT...", "Folders that hold the checkpoints of a run.")],
    html: Annotated[
        Path | None, option("--html", "FILE", "Write a page with all of it: one file, for any browser, offline.")
    ] = None,
    no_slurm: Annotated[
        bool, typer.Option("--no-slurm", help="Do not ask Slurm's accounting when jobs waited and ended.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show where the hours of runs went: training that counted, lost, saving, restoring, starting, queueing."""
    from ckptman.tools.monitoring.report import as_data, read_reports

    if html is not None and (not html.name or html.is_dir()):
        raise ConfigError(f"--html: the name of a file, such as report.html, not {str(html)!r}")
    now = time.time()
    found = read_reports(roots, now, slurm=not no_slurm)
    if html is not None:
        from ckptman.storage.io.durable_files import DISK
        from ckptman.tools.monitoring.page import make_page

        page = make_page(found, now)
        DISK.make_folders(html.absolute().parent)
        DISK.replace_file(html, page.encode())
    if as_json:
        console.say_json([as_data(each) for each in found])
    else:
        console.say(*_lines(found), *([f"written to {console.plain(html)}"] if html is not None else []))


def _lines(found: Sequence[RunReport]) -> list[str]:
    from ckptman.tools.monitoring.ledger import add
    from ckptman.tools.monitoring.report import shares

    lines: list[str] = []
    for each in found:
        lines += [*_run_lines(each), ""]
    if len(found) > 1:
        rows = shares(add([each.ledger for each in found]))
        lines += [f"all {len(found)} runs", *_time_table(rows), ""]
    return lines[:-1]


def _run_lines(found: RunReport) -> list[str]:
    from ckptman.policies.intervals import duration_text
    from ckptman.tools.monitoring.report import endings_text, shares

    ledger, status = found.ledger, found.status
    lines = [
        f"{console.plain(found.root)}: {status.state}, step {status.step or 0:,} after "
        f"{duration_text(ledger.total_seconds)} and {console.count(len(ledger.attempts), 'attempt')}: "
        f"{endings_text(ledger)}",
        *_time_table(shares(ledger.seconds)),
    ]
    if ledger.goodput is not None:
        line = f"goodput {ledger.goodput:.1%} of the {duration_text(ledger.held_seconds)} in which it held nodes"
        is_in_slurm = any(each.job_id for each in ledger.attempts)
        unknown = (span.seconds for span in ledger.spans if span.kind == "unknown" and not span.world_size)
        away = sum(unknown) if is_in_slurm else 0.0
        lines.append(line + (f", if it held none in {duration_text(away)} that are not known" if away >= 1 else ""))
    if ledger.mtbf_seconds is not None:
        line = f"a failure every {duration_text(ledger.mtbf_seconds)}"
        if ledger.interval_seconds is not None and ledger.advised_seconds is not None:
            line += (
                f", a save every {duration_text(ledger.interval_seconds)}; "
                f"{duration_text(ledger.advised_seconds)} would lose least"
            )
        lines.append(line)
    rows = [
        (
            str(each.number or "-"),
            console.plain(each.job_id) or "-",
            f"{each.start_step:,} to {each.step:,}",
            duration_text(each.ended - each.begun),
            duration_text(each.seconds["training"]),
            duration_text(each.seconds["repeated"]),
            console.plain(_cropped(f"{each.ending}: {each.reason}" if each.reason else each.ending)),
        )
        for each in ledger.attempts[-ATTEMPTS_SHOWN:]
    ]
    headers = ("attempt", "job", "steps", "took", "counted", "lost", "end")
    width = console.page_width()
    lines += ["", *console.table(headers, rows, "attempt took counted lost", drop=("job", "took"), width=width)]
    if len(ledger.attempts) > ATTEMPTS_SHOWN:
        lines.append(f"the last {ATTEMPTS_SHOWN} of {len(ledger.attempts)} attempts; --html and --json have all")
    return [*lines, *(f"note: {console.plain(note)}" for note in ledger.notes)]


def _cropped(text: str) -> str:
    """A reason may be the text of any error; --json has all of it."""
    return text if len(text) <= MOST_REASON else text[: MOST_REASON - 3] + "..."


def _time_table(rows: Sequence[tuple[str, str, float, float]]) -> list[str]:
    from ckptman.policies.intervals import duration_text

    cells = [(f"  {name}", duration_text(seconds), f"{share:.1%}") for _, name, seconds, share in rows]
    return console.table(("  where the time went", "time", "share"), cells, "time share")

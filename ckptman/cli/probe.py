"""`ckptman probe loader MODULE:FUNCTION`: whether data keeps up with the training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptman.cli import console
from ckptman.cli.console import ending_cleanly, status_line
from ckptman.cli.help import Group, Verb
from ckptman.cli.options import AsJson, option, parse_numbers, path_argument
from ckptman.errors import CkptmanError, ConfigError, NotFoundError
from ckptman.forecast.data_rate import Judgement, Need, judge, rate_text
from ckptman.policies.parameters import check_positive
from ckptman.policies.retention_rules import size_text

if TYPE_CHECKING:
    from ckptman.data.probe import Probed

MOST_SECONDS = 3600
MOST_WORKERS = 1024
_MOST_LINE = 100

probe_app = typer.Typer(
    help="Try a part of the training by itself.", cls=Group, rich_markup_mode=None, no_args_is_help=True
)


@probe_app.callback()
def _probe() -> None:
    """Try a part of the training by itself."""


@probe_app.command("loader", cls=Verb)
def probe_loader(
    source: Annotated[
        str, path_argument("MODULE:FUNCTION", "Makes the loader: train:make_loader, or train.py:make_loader.")
    ],
    workers: Annotated[
        str | None, option("--workers", "N,N,...", "Numbers of workers to try (0, 1, 2, 4 ... up to the CPUs).")
    ] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", metavar="N", min=1, help="Batch size if FUNCTION returns a Dataset.")
    ] = 32,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="SECONDS", help="Length of each of the two passes.")
    ] = 10.0,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="Timeout for the next batch, and for the import.")
    ] = 120.0,
    data: Annotated[
        list[str] | None,
        option("--data", "PATH", "Files of the data, to drop from the page cache first. May be given several times."),
    ] = None,
    root: Annotated[
        str | None,
        option("--root", "ROOT", "The run whose steps per second are needed, by its journal.", "What is needed"),
    ] = None,
    steps_per_second: Annotated[
        float | None, option("--steps-per-second", "RATE", "The steps per second that are needed.")
    ] = None,
    batches_per_step: Annotated[
        int, typer.Option("--batches-per-step", metavar="N", min=1, help="More than 1 with gradient accumulation.")
    ] = 1,
    ranks_per_node: Annotated[
        int, typer.Option("--ranks-per-node", metavar="N", min=1, help="Ranks of a node, each with a loader.")
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Measure a loader alone, and say whether it keeps up.

    Calls FUNCTION(num_workers=N), or FUNCTION() if it takes no num_workers, and iterates over the DataLoader, Dataset
    or iterable that it returns: first with its files out of the page cache, then once more. Exit code 1: it cannot be
    iterated, or it will starve the GPUs.
    """
    for name, number in (("--seconds", seconds), ("--timeout", timeout)):
        check_positive("probe loader", name, number)
        if number > MOST_SECONDS:
            raise ConfigError(f"{name}: an hour at most ({MOST_SECONDS} s), not {number:g}")
    asked = f"numbers from 0 to {MOST_WORKERS}"
    numbers = parse_numbers("--workers", workers, asked, "0,2,8", most=MOST_WORKERS) or None
    for each in data or ():
        if not Path(each).exists():
            raise NotFoundError(f"--data: there is no {each}: name files or folders of the data")
    rate = _steps_per_second(root, steps_per_second)
    need = None if rate is None else Need(rate, batches_per_step, ranks_per_node)

    from ckptman.data.loader_source import LoaderSource, find_function, parse_source
    from ckptman.data.probe import allowed_cpus, probe_loader

    parse_source(source)
    with ending_cleanly(), status_line() as note:
        found = probe_loader(
            lambda: LoaderSource(source, find_function(source), batch_size),
            numbers,
            seconds,
            timeout,
            list(map(Path, data or ())),
            note,
        )
    judgement = None
    if need is not None and found.problem is None:
        rates = [(each.workers, each.batches_per_second) for each in found.measurements]
        judgement = judge(need, rates, allowed_cpus())
    notes = [*found.notes, *_notes(found, need)]
    if as_json:
        needed = None if need is None else {**vars(need), "batches_per_second": need.batches_per_second}
        console.say_json(
            {
                "measurements": found.measurements,
                "need": needed,
                "judgement": judgement,
                "dropped_files": found.dropped_files,
                "notes": notes,
                "problem": None if found.problem is None else str(found.problem),
            }
        )
    else:
        _say(found, notes, judgement)
    if found.problem is not None:
        raise found.problem
    if judgement is not None and judgement.verdict == "starves":
        raise CkptmanError(judgement.text.removesuffix("."))


def _steps_per_second(root: str | None, given: float | None) -> float | None:
    from ckptman.runtime.journal import read_journal, steps_per_second
    from ckptman.storage.format.paths import journal_path

    if given is not None:
        check_positive("probe loader", "--steps-per-second", given)
        if root is not None:
            raise ConfigError("--root and --steps-per-second both say how fast the training is: give one of them")
    if root is None:
        return given
    rate = steps_per_second(read_journal(journal_path(Path(root)))[0])
    if rate is None:
        raise NotFoundError(
            f"the journal of {root} does not say how fast its steps are: let it train for some more steps, or give "
            f"--steps-per-second"
        )
    return rate


def _notes(found: Probed, need: Need | None) -> list[str]:
    from ckptman.data.probe import SHORT_SECONDS

    notes = []
    if any(each.cold.is_whole and each.cold.seconds < SHORT_SECONDS for each in found.measurements):
        notes.append(f"Rough: the loader came to its end after less than {SHORT_SECONDS:g} s; give it more samples.")
    if not found.dropped_files:
        notes.append("Cold is not cold: no file of the data is known; name its files with --data, if it has any.")
    if found.problem is None and need is None:
        notes.append("Whether that is enough: give --root or --steps-per-second.")
    elif found.problem is None and need is not None:
        best = max(each.batches_per_second for each in found.measurements)
        if best < need.batches_per_second <= max(each.warm.batches_per_second for each in found.measurements):
            notes.append("The page cache is fast enough: if the data fits into memory, only the first epoch is slow.")
    return notes


def _say(found: Probed, notes: list[str], judgement: Judgement | None) -> None:
    rows = [
        (
            str(each.workers) if cache == "cold" else "",
            cache,
            rate_text(one.batches_per_second),
            rate_text(one.samples_per_second),
            f"{size_text(one.bytes_per_second, 3)}/s",
            f"{one.first_batch_seconds:.2f} s",
        )
        for each in found.measurements
        for cache, one in (("cold", each.cold), ("warm", each.warm))
    ]
    headers = ("workers", "cache", "batches/s", "samples/s", "tensors", "first batch")
    right = "workers batches/s samples/s tensors"
    console.say(*console.table(headers, rows, right=right, drop=("samples/s", "first batch")), "")
    if judgement is not None and judgement.verdict != "starves":  # else it is the error
        notes = [*notes, judgement.text]
    width = max(40, min(_MOST_LINE, console.terminal_width() or 80))
    for each in notes:
        console.say(*console.fold(each, width))

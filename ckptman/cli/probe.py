"""`ckptman probe loader MODULE:FUNCTION`: whether data keeps up with the training, and what it reads for that."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptman.cli import console
from ckptman.cli.help import Group, Verb
from ckptman.cli.options import AsJson, option, path_argument
from ckptman.cli.progress import ending_cleanly, status_line
from ckptman.errors import CkptmanError, ConfigError, NotFoundError
from ckptman.forecast.data_rate import (
    MUCH_BYTES_PER_SECOND,
    TOO_MUCH_BYTES_PER_SECOND,
    Judgement,
    Need,
    judge,
    rate_text,
)
from ckptman.policies.parameters import check_count, check_positive
from ckptman.policies.retention_rules import size_text

if TYPE_CHECKING:
    from ckptman.data.loader_source import LoaderSource
    from ckptman.data.probe import Measurement, Pass, Probed
    from ckptman.storage.io.mount import Family, Mount
    from ckptman.train.config import Config

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
        str | None,
        path_argument(
            "[MODULE:FUNCTION]", "What makes the loader: train:make_loader, or train.py:make_loader for a file."
        ),
    ] = None,
    config: Annotated[
        str | None, option("--config", "RUN.TOML", "The data of the bundled loop, in place of MODULE:FUNCTION.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        option("--set", "SECTION.KEY=VALUE", "Change one value of --config. May be given several times."),
    ] = None,
    world_size: Annotated[
        int | None, option("--world-size", "N", "With --config: ranks that share a batch (those of one node).")
    ] = None,
    workers: Annotated[
        str | None, option("--workers", "N,N,...", "Numbers of workers to try (0, 1, 2, 4 ... up to the CPUs).")
    ] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", metavar="N", help="Where FUNCTION returns a Dataset.")
    ] = 32,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="SECONDS", help="For each of the two passes with so many workers.")
    ] = 10.0,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="Give up when the next batch takes longer than this.")
    ] = 120.0,
    data: Annotated[
        list[str] | None,
        option("--data", "PATH", "Files of the data, to begin without them in memory. May be given several times."),
    ] = None,
    root: Annotated[
        str | None,
        option("--root", "ROOT", "The run whose steps per second are needed, by its journal.", "What is needed"),
    ] = None,
    steps_per_second: Annotated[
        float | None, option("--steps-per-second", "RATE", "The steps per second that are needed.")
    ] = None,
    batches_per_step: Annotated[
        int, typer.Option("--batches-per-step", metavar="N", help="More than 1 where gradients are accumulated.")
    ] = 1,
    ranks_per_node: Annotated[
        int, typer.Option("--ranks-per-node", metavar="N", help="Ranks of a node, each with a loader.")
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Measure a loader alone, and say whether it keeps up.

    Runs FUNCTION(num_workers=N), or FUNCTION() where it takes no num_workers, and iterates over the DataLoader, Dataset
    or iterable that it returns: first with its files out of the page cache, then once more. Exit code 1: it cannot be
    iterated, or it will starve the GPUs.
    """
    for name, number in (("--seconds", seconds), ("--timeout", timeout)):
        check_positive("probe loader", name, number)
        if number > MOST_SECONDS:
            raise ConfigError(f"{name}: an hour at most ({MOST_SECONDS} s), not {number:g}")
    for name, count in (("--batch-size", batch_size), ("--batches-per-step", batches_per_step)):
        check_count("probe loader", name, count)
    check_count("probe loader", "--ranks-per-node", ranks_per_node)
    numbers = None if workers is None else _parse_workers(workers)
    paths = [_existing(each) for each in data or ()]
    make: Callable[[], LoaderSource]
    if config is not None:
        if source is not None or workers is not None:
            raise ConfigError("--config has the loader of the bundled loop, without workers: leave the others out")
        loop, make = _bundled(Path(config), changes or [], ranks_per_node if world_size is None else world_size)
        paths, numbers = paths or [loop.data.path], None
        if root is None and steps_per_second is None:
            root = _with_journal(loop.checkpoint.root)
    elif source is None:
        raise ConfigError("name what makes the loader, such as train:make_loader, or give --config of the bundled loop")
    elif changes or world_size is not None:
        raise ConfigError("--set and --world-size are of --config: leave them out")
    else:
        make = _named(source, batch_size)
    need = _need(root, steps_per_second, batches_per_step, ranks_per_node)

    from ckptman.data import probe

    with ending_cleanly(), status_line() as note:
        found = probe.probe_loader(make, numbers, seconds, timeout, paths, note)
    judgement = None
    if need is not None and found.problem is None:
        judgement = judge(need, _rates(found.measurements), probe.allowed_cpus())
    place = _place(found.files)
    reading = _reading(found, need, place)
    if as_json:
        console.say_json(_as_dict(found, need, judgement, reading, place))
    else:
        told = [judgement.text] if judgement is not None and judgement.verdict != "starves" else []
        if need is None and found.problem is None:
            told = ["Whether that is enough: give --root or --steps-per-second."]
        _say(found, [*_notes(found, need), *filter(None, (_reading_text(reading, need, place),)), *told])
    if found.problem is not None:
        raise found.problem
    if judgement is not None and judgement.verdict == "starves":
        raise CkptmanError(judgement.text.removesuffix("."))


def _parse_workers(written: str) -> list[int]:
    try:
        numbers = [int(each) for each in written.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 0 or max(numbers) > MOST_WORKERS:
        raise ConfigError(
            f"--workers: numbers from 0 to {MOST_WORKERS} with commas between them, such as 0,2,8, not {written!r}"
        )
    return list(dict.fromkeys(numbers))


def _existing(path: str) -> Path:
    if not Path(path).exists():
        raise NotFoundError(f"--data: there is no {path}: name files or folders of the data")
    return Path(path)


def _named(source: str, batch_size: int) -> Callable[[], LoaderSource]:
    from ckptman.data.loader_source import LoaderSource, find_function, parse_source

    parse_source(source)
    return lambda: LoaderSource(source, find_function(source), batch_size)


def _bundled(path: Path, changes: Sequence[str], world_size: int) -> tuple[Config, Callable[[], LoaderSource]]:
    """Return the configuration of the bundled loop, and what makes the loader of one of its ranks."""
    from ckptman.data.loader_source import LoaderSource
    from ckptman.train.config import load_config
    from ckptman.train.dataset.tokenfile import read_meta, sample_count

    check_count("probe loader", "--world-size", world_size)
    config = load_config(path, changes)
    sample_count(config.data.path, read_meta(config.data.path), config.data.sequence_tokens)

    def batches() -> Iterator[Any]:
        from ckptman.train.dataset.batches import TokenData

        # In one piece, whatever it is cut into afterwards: it is the same work.
        data = config.data.model_copy(update={"micro_batch": config.data.global_batch})
        rank = TokenData(data, config.run.seed, 0, world_size)
        while True:
            yield rank.next_batch()

    return config, lambda: LoaderSource(str(path), batches)


def _with_journal(root: Path) -> str | None:
    """Return the root if its run has told how fast it is."""
    try:
        return str(root) if _steps_per_second(str(root)) is not None else None
    except (CkptmanError, OSError):
        return None


def _steps_per_second(root: str) -> float | None:
    from ckptman.runtime.journal import read_journal
    from ckptman.runtime.measurements import steps_per_second
    from ckptman.storage.format.paths import journal_path

    return steps_per_second(read_journal(journal_path(Path(root)))[0])


def _need(root: str | None, rate: float | None, batches_per_step: int, ranks: int) -> Need | None:
    if rate is not None:
        if root is not None:
            raise ConfigError("--root and --steps-per-second both say how fast the training is: give one of them")
        check_positive("probe loader", "--steps-per-second", rate)
    elif root is not None:
        rate = _steps_per_second(root)
        if rate is None:
            raise NotFoundError(
                f"the journal of {root} does not say how fast its steps are: let it train for some more steps, or give "
                f"--steps-per-second"
            )
    return None if rate is None else Need(rate, batches_per_step, ranks)


def _rates(measurements: Sequence[Measurement]) -> list[tuple[int, float]]:
    """Return the batches per second that can be counted on: those of the slower pass."""
    return [(each.workers, min(each.cold.batches_per_second, each.warm.batches_per_second)) for each in measurements]


def _place(files: Sequence[str]) -> tuple[Mount, Family] | None:
    """Return the mount that most files of the data are on; None: that is not known."""
    from ckptman.storage.io.mount import family_of, find_mount, read_mounts

    mounts = read_mounts()
    found = Counter(filter(None, (find_mount(mounts, str(Path(each).resolve())) for each in files)))
    if not found:
        return None
    mount = found.most_common(1)[0][0]
    return mount, family_of(mount)


def _reading(found: Probed, need: Need | None, place: tuple[Mount, Family] | None) -> dict[str, Any]:
    """Return what a batch takes from files, and a node with that: at the rate that is needed, or that was measured."""
    per_batch = max(each.cold.file_bytes_per_batch for each in found.measurements)
    rate = need.batches_per_second if need else max(rate for _, rate in _rates(found.measurements))
    return {
        "bytes_per_batch": per_batch,
        "bytes_per_second": per_batch * rate,
        "file_system": None if place is None else place[1].name,
        "mount_point": None if place is None else place[0].point,
        "shared": None if place is None else place[1].shared,
    }


def _reading_text(reading: dict[str, Any], need: Need | None, place: tuple[Mount, Family] | None) -> str | None:
    if place is None:
        return None
    mount, family = place
    rate = reading["bytes_per_second"]
    why = "for that" if need else "at this rate"
    told = f"A node reads {size_text(rate, 3)}/s {why} from {family.name} at {mount.point}"
    if family.shared is False:
        return f"{told}, which other nodes do not see."
    shared = "shared with other nodes" if family.shared else "perhaps shared with other nodes"
    if rate < MUCH_BYTES_PER_SECOND:
        return f"{told}, {shared}: under {size_text(MUCH_BYTES_PER_SECOND)}/s, fine."
    remedy = "copy the data to a disk of the node, or pack and compress it"
    if rate < TOO_MUCH_BYTES_PER_SECOND:
        return f"{told}, {shared}: much. With many nodes, {remedy}."
    return f"{told}, {shared}: too much, over {size_text(TOO_MUCH_BYTES_PER_SECOND)}/s. {remedy.capitalize()}."


def _notes(found: Probed, need: Need | None) -> list[str]:
    from ckptman.data.probe import SHORT_SECONDS

    notes = list(found.notes)
    passes = [each.cold for each in found.measurements]
    if any(each.is_whole and each.seconds < SHORT_SECONDS for each in passes):
        notes.append(f"Rough: the loader came to its end after less than {SHORT_SECONDS:g} s; give it more samples.")
    if all(each.storage_bytes is None for each in passes):
        notes.append("The kernel does not tell here what is read, and from where.")
    elif all((each.storage_bytes or 0) < each.cached_bytes for each in passes):
        hint = "some file systems of networks are not counted" if found.dropped else "name its files with --data"
        notes.append(f"Cold is not cold: most of what was read came from the page cache, or was not counted ({hint}).")
    elif not any(each.storage_bytes for each in passes):
        hint = "" if found.dropped else "; name its files with --data, if it has any"
        notes.append(f"Nothing was read from storage{hint}.")
    if need is not None and found.measurements and found.problem is None:
        best = max(_rates(found.measurements), key=lambda pair: pair[1])[1]
        warm = max(each.warm.batches_per_second for each in found.measurements)
        if best < need.batches_per_second <= warm:
            notes.append(
                "From the page cache it would do: where the data fits into memory, only the first epoch is slow."
            )
    return notes


def _say(found: Probed, sentences: Sequence[str]) -> None:
    width = min(_MOST_LINE, console.terminal_width() or 80)
    headers = ("workers", "cache", "batches/s", "samples/s", "tensors", "from storage", "first batch")
    rows = [
        (
            str(each.workers) if cache == "cold" else "",
            cache,
            rate_text(one.batches_per_second),
            rate_text(one.samples_per_second),
            f"{size_text(one.bytes_per_second, 3)}/s",
            _storage_text(one),
            f"{one.first_batch_seconds:.2f} s",
        )
        for each in found.measurements
        for cache, one in (("cold", each.cold), ("warm", each.warm))
    ]
    right = "workers batches/s samples/s tensors"
    console.say(*console.table(headers, rows, right=right, drop=("samples/s", "first batch")), "")
    for each in sentences:
        console.say(*textwrap.wrap(console.plain(each), max(width, 40), break_on_hyphens=False, break_long_words=False))


def _storage_text(found: Pass) -> str:
    rate = found.storage_bytes_per_second
    return "unknown" if rate is None else f"{size_text(rate, 3)}/s"


def _as_dict(
    found: Probed,
    need: Need | None,
    judgement: Judgement | None,
    reading: dict[str, Any],
    place: tuple[Mount, Family] | None,
) -> dict[str, Any]:
    def one(each: Pass) -> dict[str, Any]:
        return {
            "batches_per_second": each.batches_per_second,
            "samples_per_second": each.samples_per_second,
            "bytes_per_second": each.bytes_per_second,
            "first_batch_seconds": each.first_batch_seconds,
            "seconds": each.seconds,
            **each.weight._asdict(),
            "taken": each.taken,
            "read_batches": each.read_batches,
            "read_bytes": each.read_bytes,
            "storage_bytes": each.storage_bytes,
            "is_whole": each.is_whole,
        }

    return {
        "measurements": [
            {"workers": each.workers, "cold": one(each.cold), "warm": one(each.warm)} for each in found.measurements
        ],
        "need": None
        if need is None
        else {
            "steps_per_second": need.steps_per_second,
            "batches_per_step": need.batches_per_step,
            "ranks_per_node": need.ranks,
            "batches_per_second": need.batches_per_second,
        },
        "judgement": None if judgement is None else vars(judgement),
        "reading": reading,
        "dropped_files": found.dropped,
        "notes": _notes(found, need),
        "problem": None if found.problem is None else str(found.problem),
    }

"""Select the checkpoints a verb works on: one folder, those of a root, or those in an object store; `ckptman path`."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptman.cli import console
from ckptman.cli.options import flag, option, path_argument
from ckptman.errors import ConfigError, NotFoundError, plain
from ckptman.storage.catalog.root_checks import check_is_folder
from ckptman.storage.format.foreign import foreign_in, recognize
from ckptman.storage.format.paths import DOT, check_is_no_checkpoint, is_checkpoint, parse_step

if TYPE_CHECKING:
    from ckptman.storage.catalog.backends.backend import Backend
    from ckptman.storage.catalog.catalog import Entry

PathOrRoot = Annotated[Path, path_argument("PATH", "A checkpoint, or a root (then of its newest checkpoint).")]
Step = Annotated[int | None, option("--step", "N", "Of a root: the checkpoint of this step.")]
MOST_NAMES, MOST_FOLDERS, SHOWN = 5_000, 100, 3
"""So many names of a folder are looked at, into so many folders in it, and so many are suggested."""


def _folder(root: Path) -> Path:
    check_is_folder(root)
    check_is_no_checkpoint(root)
    return root


Root = Annotated[
    Path,
    typer.Argument(
        metavar="ROOT", show_default=False, readable=False, callback=_folder, help="The folder that holds checkpoints."
    ),
]


def is_foreign(path: Path) -> bool:
    """Whether plain DCP, or what builds on it, wrote this folder: torch's metadata, no manifest, no name of ours."""
    found = recognize(path)
    return found is not None and found.is_dcp


def roots_of(written: list[str]) -> tuple[list[Path], bool]:
    """Expand paths and patterns to folders, each once; and return whether several were asked for.

    Raises: NotFoundError where a pattern matches no folder, ConfigError for an empty one.
    """
    found: dict[str, Path] = {}
    several = len(written) > 1
    for each in written:
        if not each.strip():  # a variable that is not set: the folder we are in is not what was meant
            raise ConfigError("the path of a root is empty: is a variable not set?")
        check_is_folder(each)
        paths = [each]
        # A folder may well have a bracket in its name.
        if glob.has_magic(each) and not os.path.lexists(each):
            several = True
            paths = sorted(path for path in glob.glob(each, recursive=True) if os.path.isdir(path))  # noqa: PTH207, PTH112
            if not paths:
                raise NotFoundError(f"no folder matches {each!r}: check the pattern, and the folder you are in")
        for path in paths:
            found.setdefault(os.path.realpath(path), Path(path))
    return list(found.values()), several


def choose(
    path: Path, step: int | None = None, every: bool = False, passed_over: bool = False, allow_nonfinite: bool = False
) -> list[Entry]:
    """Return the entries to work on: of a root the one that a restore takes, that of `step`, or all.

    If a restore does not take the newest, a line on standard error says why. `passed_over`: also those that may have
    been newer and do not count, before it. `allow_nonfinite`: the newest, even if it holds NaN or infinity or is a
    suspect.

    Raises: NotFoundError (no such root, step or checkpoint), RootError, ConfigError (--step of a single checkpoint).
    """
    from ckptman.storage.catalog.catalog import Catalog

    check_is_folder(path)
    if step is not None and every:
        raise ConfigError("--step and --all exclude each other: name one of them")
    if is_checkpoint(path):
        if step is not None or every:
            option = "--all" if every else "--step"
            raise ConfigError(f"{option} chooses among the checkpoints of a root, and {path} is one checkpoint")
        from ckptman.storage.catalog.catalog import look_at_folder

        return [look_at_folder(path)]
    if (other := recognize(path)) is not None:
        other.refuse()
    catalogue = Catalog(path)
    if step is not None:
        return [catalogue.entry(step)]
    suspects = {} if allow_nonfinite or every else known_suspects(path)

    def will_do(entry: Entry) -> bool:
        return allow_nonfinite or not (entry.nonfinite_reason or entry.step in suspects)

    entries = catalogue.look() if every or passed_over else catalogue.scan(until=will_do)
    if not entries:
        others = [each for each in foreign_in(path, catalogue.names()) if each.is_dcp]
        raise NotFoundError(
            f"{path} holds no checkpoint (a folder such as step-0000000100, or one with a manifest.json or .metadata)"
            + (f", but {others[-1].path} is a checkpoint of {others[-1].writer}: name that folder" if others else "")
        )
    if every:
        return entries
    return _newest(entries, suspects, passed_over, allow_nonfinite)


def _newest(
    entries: list[Entry], suspects: Mapping[int, str], passed_over: bool, allow_nonfinite: bool = False
) -> list[Entry]:
    # One that only a newer ckptman can read may well be the newest: a restore refuses to go back behind it, too.
    newest = next((entry for entry in entries if entry.newer_format), entries[-1])
    if newest.newer_format is None and passed_over:
        newest = next((entry for entry in reversed(entries) if entry.complete), newest)
    if not allow_nonfinite:
        newest = _as_restored(newest, entries, suspects)
    passed = [each for each in entries if passed_over and each is not newest and _may_be_newer(each, newest)]
    return [*passed, newest]


def _as_restored(newest: Entry, entries: list[Entry], suspects: Mapping[int, str]) -> Entry:
    """Return what a restore takes instead of the newest that is complete, and say why."""
    from ckptman.policies.restore_choice import choose

    choice = choose(reversed(entries), suspects)
    taken = choice.best
    if not newest.complete or taken is None or taken is newest:
        return newest
    why = f"not finite ({newest.nonfinite_reason})" if choice.nonfinite else f"a suspect: {suspects[newest.step]}"
    console.remark(
        f"step {newest.step} is {why}, so this is step {taken.step}, as for a restore: name the newest by its step, or "
        f"its folder, to have that"
    )
    return taken


def known_suspects(root: str | os.PathLike[str]) -> dict[int, str]:
    """Return the steps that a restore passes over; {}, with a line on standard error, if the journal is unreadable."""
    from ckptman.runtime.journal import suspects_of

    try:
        return suspects_of(root)
    except OSError as error:
        console.remark(
            f"the journal of {root} cannot be read ({error.strerror or error}), so it is not known which checkpoints "
            f"attempts crashed with: check its permissions"
        )
        return {}


def _may_be_newer(entry: Entry, newest: Entry) -> bool:
    """Return whether an entry that does not count may have been saved after the newest that does."""
    if entry.complete or entry.newer_format is not None:
        return False
    return entry.unreadable is not None or entry.step > newest.step or entry.sequence > newest.sequence


def choose_objects(url: str, step: int | None, every: bool) -> tuple[Backend, list[Entry]]:
    """The entries a command is about, as `choose` says, and where they are.

    Without a choice: the newest that counts, after those that do not and may be newer.
    Raises: ConfigError, NotFoundError, RootError.
    """
    from ckptman.storage.catalog.backends.object_store import ObjectBackend

    if step is not None and every:
        raise ConfigError("--step and --all exclude each other: name one of them")
    above, _, last = url.rpartition("/")
    if (named := parse_step(last)) is not None and named.kind == "step":
        if step is not None or every:
            raise ConfigError(f"--step and --all choose among the checkpoints of a root, and {url} is one checkpoint")
        url, step = above, named.step
    place = ObjectBackend(url)
    entries: list[Entry] = [*place.look(abandoned=True)]
    if step is not None:
        found = [entry for entry in entries if entry.step == step]
        if not found:
            known = ", ".join(str(entry.step) for entry in entries[-10:]) or "none"
            raise NotFoundError(f"{url} has no checkpoint of step {step}; the latest there are: {known}")
        return place, found
    entries = [entry for entry in entries if not entry.abandoned]
    return place, entries if every or not entries else _newest(entries, {}, passed_over=True)


def path(
    root: Root,
    latest: Annotated[bool, flag("--latest", "The newest one that counts: the default.")] = False,
    best: Annotated[
        str | None, option("--best", "METRIC", "The one with the lowest value of a metric, such as loss.")
    ] = None,
    step: Annotated[int | None, option("--step", "N", "The one of this step.")] = None,
    highest: Annotated[bool, flag("--max", "With --best: the one with the highest value.")] = False,
) -> None:
    """Print the path of one checkpoint: python eval.py "$(ckptman path ROOT --best loss)".

    Only one that counts: it is complete, not known to be damaged, and no rollback left it behind. Exit code 3: there is
    none.
    """
    from ckptman.run import Run

    if latest + (best is not None) + (step is not None) > 1:
        raise ConfigError("--latest, --best and --step exclude each other: name one of them")
    if highest and best is None:
        raise ConfigError("--max says how --best compares: name the metric, as in --best accuracy --max")
    run = Run(root)
    counting = [each for each in run.checkpoints if each.counts]
    missing = "there is no checkpoint that counts"
    if best is not None:
        found = run.best(best, "max" if highest else "min")
        missing = f"no checkpoint has a finite {plain(best)}" if counting else missing
    elif step is not None:
        found = next((each for each in reversed(counting) if each.step == step), None)
        missing = f"there is no checkpoint of step {step} that counts" if counting else missing
    else:
        found = run.latest
    if found is None:
        raise NotFoundError(f"{root}: {missing}: ckptman list {root} shows what is there")
    console.say(str(found.path))


def suggestion(arguments: Sequence[str], said: str, *, is_missing: bool = True) -> str:
    """Return what to add to an error for the first of the arguments that it names; "" where nothing can be said.

    `is_missing`: the error is that something is not there; else that what is there is not what was wanted.
    """
    for each in arguments[1:]:  # after the verb
        written = each.partition("=")[2] if each.startswith("--") else each
        if (
            not written
            or written.isdigit()
            or not re.search(rf"(?<![\w/.-]){re.escape(plain(written))}(?![\w/-])", said)
        ):
            continue
        try:
            os.lstat(written)
        except (FileNotFoundError, NotADirectoryError):
            found = nearest(Path(written)) if is_missing else []
        except (OSError, ValueError):
            continue
        else:
            found = roots_near(Path(written))
        if found:
            return f". Did you mean {' or '.join(plain(path) for path in found)}?"
    return ""


def nearest(path: Path) -> list[Path]:
    """Return paths that are there and are written nearly like one that is not."""
    from difflib import get_close_matches

    there, missing = path, list[str]()
    while not os.path.isdir(there) or missing == []:  # noqa: PTH112 never raises
        if there == there.parent:
            return []
        missing.insert(0, there.name)
        there = there.parent
    similar = [there / name for name in get_close_matches(missing[0], _names(there), SHOWN)]
    whole = [each.joinpath(*missing[1:]) for each in similar]
    return [each for each in whole if os.path.lexists(each)] or similar


def roots_near(path: Path) -> list[Path]:
    """Return the roots right below a folder that is not one, or the root that it lies in."""
    if _is_root(path):
        return []
    if _is_root(path.absolute().parent):
        return [path.parent if path.name else Path("..")]
    return [path / name for name in _names(path)[:MOST_FOLDERS] if _is_root(path / name)][:SHOWN]


def _is_root(folder: Path) -> bool:
    return any(name == DOT or parse_step(name) is not None for name in _names(folder))


def _names(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as found:
            return sorted(each.name for each in islice(found, MOST_NAMES))
    except OSError:  # a file, or not for us to see
        return []

"""The newest checkpoints of any program, by names, tracker files, sizes and times. Only tracker files are read."""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ckptman.errors import CkptmanError
from ckptman.format.paths import DOT
from ckptman.io.safe_open import read_regular

MOST_ENTRIES = 50_000
"""How many files and folders are looked at, under each place."""
_MOST_SCHEMES = 100
"""In a record."""
_DEPTH = 3
_MOST_TRACKER_BYTES = 4096
_MOST_FILES = 2000
"""In one checkpoint, whose sizes are summed; a larger one is taken to be complete."""
_COMPLETE = 0.9
"""A checkpoint smaller than this share of the one before was cut short, or is still being written."""
_TRACKERS = frozenset(
    ("latest_checkpointed_iteration.txt", "latest", "latest.txt", "latest_checkpoint", "last_checkpoint", "checkpoint")
)
_SUFFIXES = (
    *(".pt", ".pth", ".ckpt", ".bin", ".tar", ".safetensors", ".npz", ".npy", ".h5", ".hdf5", ".pkl", ".pickle"),
    *(".msgpack", ".distcp", ".params", ".pdparams", ".zip"),
)
_KEYWORDS = ("global_?step", "step", "iter(?:ation)?", "it", "checkpoint", "ckpt", "epoch")
_FOLDER = re.compile(rf"(?:.*[-_.])?(?:{'|'.join(_KEYWORDS)}|model|save)s?[-_=.]?\d+.*", re.IGNORECASE)
_BY_KEYWORD = [re.compile(rf"(?:^|[^a-z]){each}[-_=.]?(\d+)", re.IGNORECASE) for each in _KEYWORDS]
_ALONE = re.compile(r"(?:^|[-_=.])(\d+)(?=$|[-_=.])")
"""A number of its own: not that of `gpt2`, `7b`, `rank0`."""
_NOT_A_STEP = re.compile(r"\d+\.\d+|\d+-of-\d+|(?:rank|shard|part|version|seed|fold|node|gpu)[-_=]?\d+", re.IGNORECASE)
_UNFINISHED = re.compile(r"\..*|.*~|.*\.(?:tmp|temp|part|partial|lock|bak)|tmp[-_.].*|.*incomplete.*", re.IGNORECASE)

_SAVES = re.compile(
    r"(?:.*[._-])?(?:save|outputs?|out|ckpts?|checkpoints?|dump|work|results?|exp|default[_-]root)"
    r"(?:[_-]?(?:to|dir|directory|path|folder|root))*",
    re.IGNORECASE,
)
_READS = re.compile(r"(?:^|[._-])(?:load|resume|from|init|pretrained|input|data)(?:$|[._-])", re.IGNORECASE)
_ASSIGNED = re.compile(r"\s*(?:export\s+)?([A-Za-z_]\w*)=(\S*)\s*", re.ASCII)
_PROGRAM = re.compile(r".*\.py|-m|torchrun|accelerate|deepspeed|megatron.*", re.IGNORECASE)
_PATH = re.compile(r"[\w./@+-]*[A-Za-z_][\w./@+-]*", re.ASCII)
_OTHER_FILES = re.compile(r".*\.(?:py|ya?ml|json|toml|txt|sh|log|csv|cfg|ini|sif|img)", re.IGNORECASE)


@dataclass(frozen=True)
class Newest:
    """The newest complete checkpoint among those of one naming scheme.

    `step`: the number in its name, or in the tracker file; None if there is none. `time_seconds`: when it was changed
    last (unix). `is_sure`: it is a checkpoint, and not just a file that may be written at each start.
    """

    path: str
    step: int | None
    size_bytes: int
    time_seconds: float
    is_sure: bool = True

    def is_after(self, before: Newest | None) -> bool:
        """Return whether this is another checkpoint than the one that was the newest before, and a later one."""
        if before is None:
            return True
        if self.step is not None and before.step is not None:
            return self.step > before.step
        return self.time_seconds > before.time_seconds and self.size_bytes >= _COMPLETE * before.size_bytes


@dataclass(frozen=True)
class Left:
    """What an attempt left on disk. `has_saved`: a new checkpoint; None if nobody knows. `step`: of that; 0 if it has
    none. `note`: for people."""

    has_saved: bool | None
    newest: Mapping[str, Newest]
    step: int = 0
    note: str = ""


def find_left(
    progress: Sequence[str],
    places: Sequence[str],
    workdir: Path,
    before: Mapping[str, Newest],
    begun_seconds: float,
    *,
    is_known: bool,
) -> Left:
    """Look for what an attempt left.

    Args:
        progress: where the user says that checkpoints are.
        places: where they may be, by the arguments of the program.
        before: the newest checkpoints before the attempt, by naming scheme.
        begun_seconds: when the attempt began (unix).
        is_known: whether the checkpoints of this program have been seen already. Otherwise it may save elsewhere.
    """
    found = {**guess_newest(places, workdir), **find_newest(progress, workdir)}
    recent = sorted(found, key=lambda scheme: found[scheme].time_seconds)[-_MOST_SCHEMES:]
    newest = {scheme: found[scheme] for scheme in recent}
    new = {scheme: each for scheme, each in found.items() if each.is_after(before.get(scheme))}
    if sure := latest({scheme: each for scheme, each in new.items() if each.is_sure}):
        return Left(True, newest, sure.step or 0)
    if new:
        return Left(None, newest)
    note = ""
    written = latest({scheme: each for scheme, each in found.items() if each.time_seconds >= begun_seconds})
    if progress and not found:
        note = f"nothing matches --progress {' '.join(progress)}"
    elif written is not None and written.step is not None:
        old = max((each.step or 0 for scheme, each in before.items() if scheme in found), default=0)
        note = f"it saved step {written.step}, and step {old} was there already"
    return Left(False if is_known or progress else None, newest, note=note)


def later_of(before: Mapping[str, Newest], found: Mapping[str, Newest]) -> dict[str, Newest]:
    """Return the newest checkpoint of each naming scheme, of those before and those found now."""
    return {**before, **{scheme: each for scheme, each in found.items() if each.is_after(before.get(scheme))}}


def find_newest(places: Sequence[str], workdir: Path) -> dict[str, Newest]:
    """Return the newest checkpoints in the places that a user names, by naming scheme. What cannot be read is left out.

    Args:
        places: folders, files and glob patterns, relative to `workdir`. In a folder every known layout is found; what a
            pattern matches are checkpoints or tracker files themselves.
    """
    found: dict[str, Newest] = {}
    for place in places:
        path = workdir / Path(place).expanduser()
        if glob.has_magic(str(path)) and not os.path.lexists(path):
            entries = [Path(each) for _, each in zip(range(MOST_ENTRIES), _matching(str(path)))]
            found |= _newest_of(entries, are_named=True)
        elif path.is_dir() and not _is_checkpoint(path):
            found |= _newest_of([*_entries_below(path)])
        else:
            found |= _newest_of([path], are_named=True)
    return found


def guess_newest(places: Sequence[str], workdir: Path) -> dict[str, Newest]:
    """Return the newest checkpoints where they may be: known layouts in folders, and nothing else."""
    folders = [path for place in places if (path := workdir / Path(place).expanduser()).is_dir()]
    return {scheme: each for folder in folders for scheme, each in _newest_of([*_entries_below(folder)]).items()}


def _matching(pattern: str) -> Iterator[str]:
    return glob.iglob(pattern, recursive=True)  # noqa: PTH207 of an absolute pattern


def latest(found: Mapping[str, Newest]) -> Newest | None:
    """Return the one of these that was changed last; None if there is none."""
    return max(found.values(), key=lambda each: each.time_seconds, default=None)


def named_by(script: str, arguments: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return where a batch script and its arguments say that checkpoints go: the values of options such as `--save` and
    `--output_dir`, and the words that may be a folder. What nothing is written to does no harm."""
    variables = dict(environ) | {str(number): each for number, each in enumerate(arguments, 1)}
    lines = [["script.py", *arguments]]
    for line in script.replace("\\\n", " ").splitlines():
        if (assigned := _ASSIGNED.fullmatch(line)) is not None:
            variables[assigned[1]] = _expanded(assigned[2].strip("\"'"), variables)
        elif not line.lstrip().startswith("#"):
            try:
                lines.append(shlex.split(line, comments=True))
            except ValueError:
                lines.append(line.split())
    found: dict[str, None] = {}
    for words in lines:
        found |= dict.fromkeys(_named_in([_expanded(word.strip("\"'"), variables) for word in words]))
    return [each for each in found if "$" not in each]


def _named_in(words: Sequence[str]) -> Iterator[str]:
    is_program = False
    before = ""
    for word in words:
        option, given, value = word.lstrip("-").partition("=")
        if given and (word.startswith("-") or _PATH.fullmatch(option)):
            if _says_where(option) and _PATH.fullmatch(value):
                yield value
        elif before.startswith("-") and before != "-m":
            if _says_where(before.lstrip("-")) and _PATH.fullmatch(word):
                yield word
        elif (
            is_program
            and before != "-m"
            and _PATH.fullmatch(word)
            and not _OTHER_FILES.fullmatch(word)
            and not word.startswith("-")
        ):
            yield word
        is_program = is_program or (_PROGRAM.fullmatch(word) is not None and not word.startswith("--"))
        before = word


def _says_where(option: str) -> bool:
    return _SAVES.fullmatch(option) is not None and _READS.search(option) is None


def _expanded(word: str, variables: Mapping[str, str]) -> str:
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda found: variables.get(found[1] or found[2], found[0]), word)


def _entries_below(folder: Path) -> Iterator[Path]:
    """Yield what may be checkpoints or tracker files in a folder and some levels below it, nearest first."""
    level, looked = [folder], 0
    for _ in range(_DEPTH + 1):
        below: list[Path] = []
        for each in level:
            if (each / DOT).is_dir():
                yield each
                continue
            with suppress(OSError), os.scandir(each) as entries:
                for entry in entries:
                    looked += 1
                    if looked > MOST_ENTRIES:
                        return
                    if entry.name in _TRACKERS or _may_be_checkpoint(entry, is_top=each == folder):
                        if entry.is_dir(follow_symlinks=False) and _holds_checkpoints(entry):
                            below.append(Path(entry.path))  # of an epoch, or of one start
                        else:
                            yield Path(entry.path)
                    elif entry.is_dir(follow_symlinks=False) and not _UNFINISHED.fullmatch(entry.name):
                        below.append(Path(entry.path))
        level = below


def _may_be_checkpoint(entry: os.DirEntry[str], *, is_top: bool) -> bool:
    if _UNFINISHED.fullmatch(entry.name):
        return False
    if entry.is_dir():
        return _FOLDER.fullmatch(entry.name) is not None or (is_top and entry.name.isdigit())
    return entry.name.lower().endswith(_SUFFIXES)


def _holds_checkpoints(folder: os.DirEntry[str]) -> bool:
    """Return whether a folder with the name of a checkpoint holds checkpoints, as `epoch_3/step_400.pt`."""
    with suppress(OSError), os.scandir(folder) as entries:
        for _, entry in zip(range(_MOST_FILES), entries):
            if entry.name in _TRACKERS and entry.is_file():
                return True
            if any(each.search(entry.name) for each in _BY_KEYWORD) and _may_be_checkpoint(entry, is_top=False):
                return True
    return False


def _is_checkpoint(folder: Path) -> bool:
    """Whether a folder that was named is one checkpoint, and not a place of several."""
    return _FOLDER.fullmatch(folder.name) is not None and not any(_entries_below(folder))


def _newest_of(entries: Sequence[Path], *, are_named: bool = False) -> dict[str, Newest]:
    """Return the newest complete one of each naming scheme. A tracker file wins over the names beside it."""
    schemes: dict[str, list[Newest]] = {}
    found: dict[str, Newest] = {}
    tracked: set[Path] = set()
    for path in entries:
        with suppress(OSError, CkptmanError):
            if (path / DOT).is_dir():
                found |= _newest_of_root(path)
                continue
            status = path.stat()
            scheme = re.sub(r"\d+", "#", str(path))  # a start may have a folder of its own, with a number or the date
            is_tracker = path.name in _TRACKERS or (are_named and path.is_file() and status.st_size < 64)
            step = _step_in_tracker(path) if is_tracker else step_of(path.name)
            if is_tracker and step is not None:
                tracked.add(path.parent)
                tracker = Newest(str(path), step, 0, status.st_mtime)
                if tracker.is_after(found.get(scheme)):
                    found[scheme] = tracker
            elif not is_tracker or are_named:
                sure = are_named or step is not None
                schemes.setdefault(scheme, []).append(Newest(str(path), step, -1, status.st_mtime, sure))
    for scheme, of_scheme in schemes.items():
        left = [each for each in of_scheme if Path(each.path).parent not in tracked]
        if (newest := _newest_complete(left)) is not None:
            found[scheme] = newest
    return found


def _newest_of_root(root: Path) -> dict[str, Newest]:
    from ckptman.catalog.catalog import Catalog

    entries = Catalog(root).complete()
    last = entries[-1] if entries else None
    return {str(root): Newest(str(root), last.step, 0, last.time_seconds)} if last is not None else {}


def _newest_complete(found: Sequence[Newest]) -> Newest | None:
    """Return the newest one, unless it is much smaller than the one before: cut short, or still being written."""
    ordered = sorted(found, key=lambda each: (-1 if each.step is None else each.step, each.time_seconds))[-3:]
    sized = [replace(each, size_bytes=_bytes(Path(each.path))) for each in ordered]
    sized = [each for each in sized if each.size_bytes > 0]
    if len(sized) > 1 and sized[-1].size_bytes < _COMPLETE * sized[-2].size_bytes:
        return sized[-2]
    return sized[-1] if sized else None


def _bytes(path: Path) -> int:
    total, looked = 0, 0
    if not path.is_dir():
        return path.stat().st_size
    for folder, _, names in os.walk(path):
        for name in names:
            looked += 1
            if looked > _MOST_FILES:
                return 2**62
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def _step_in_tracker(path: Path) -> int | None:
    if path.is_symlink():
        return step_of(path.readlink().name)
    if not path.is_file():
        return None
    text = read_regular(path, _MOST_TRACKER_BYTES).decode("ascii", errors="replace").strip()
    return step_of(text.splitlines()[0].rpartition("/")[2]) if text else None


def step_of(name: str) -> int | None:
    """Return the step in the name of a checkpoint, such as 400 of `epoch=3-step=400.ckpt`; None if it has none."""
    stem = name
    for suffix in _SUFFIXES:
        stem = stem.removesuffix(suffix)
    for pattern in _BY_KEYWORD:
        if (match := pattern.search(stem)) is not None:
            return int(match[1][:18])
    alone = _ALONE.findall(_NOT_A_STEP.sub("", stem))
    return int(alone[-1][:18]) if alone else None

"""The newest checkpoints of any program, by names, tracker files, sizes and times. Only tracker files are read."""

from __future__ import annotations

import glob
import os
import re
import shlex
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ckptman.errors import CkptmanError
from ckptman.storage.format.paths import DOT
from ckptman.storage.io.safe_open import read_regular

MOST_ENTRIES = 50_000
"""How many files and folders are looked at, under each place."""
_MOST_SCHEMES = 100
"""In a record."""
_DEPTH = 3
_MOST_TRACKER_BYTES, _SMALL_BYTES = 4096, 64
"""The largest tracker file, and the largest one with a name of the user's."""
_MOST_FILES = 2000
"""In one checkpoint, whose sizes are summed; a larger one is taken to be complete."""
_WHOLE_BYTES = 2**62
"""Stands for the size of a checkpoint that is complete, however small."""
_COMPLETE = 0.9
"""A checkpoint smaller than this share of the one before was cut short, or is still being written."""
_TRACKERS = frozenset(
    ("latest_checkpointed_iteration.txt", "latest", "latest.txt", "latest_checkpoint", "last_checkpoint", "checkpoint")
)
_SUFFIXES = (
    *(".pt", ".pth", ".ckpt", ".bin", ".tar", ".safetensors", ".npz", ".npy", ".h5", ".hdf5", ".pkl", ".pickle"),
    *(".msgpack", ".distcp", ".params", ".pdparams", ".zip", ".keras"),
)
_TRACKED = re.compile(r"iter_\d{7}|global_step_?\d+")
"""Folders of Megatron and DeepSpeed, which write a tracker file after the first of them is complete."""
_REQUEUES = re.compile(r"hpc_ckpt_\d+\.ckpt")
"""Lightning's, at its own requeue: the number counts them."""
_ORBAX = frozenset(("_CHECKPOINT_METADATA", "state", "default", "params", "items"))
_KEYWORDS = "global_?step|step|iter(?:ation)?|it|checkpoint|ckpt|epoch|ep|ba"
_COUNTED = re.compile(rf"(?:^|[^a-z])(?:{_KEYWORDS})[-_=.]?\d", re.IGNORECASE)
"""In a name that says what its number counts."""
_FOLDER = re.compile(rf"(?:.*[-_.])?(?:{_KEYWORDS}|model|save)s?[-_=.]?\d+.*", re.IGNORECASE)
_NUMBER = re.compile(rf"(?:^|[-_=.]|(?<![a-z])(?:{_KEYWORDS})(?=\d))(\d{{1,18}})(?=$|[-_=.])", re.IGNORECASE)
"""Not that of `gpt2`, `7b` or `resnet50`."""
_NOT_A_STEP = re.compile(
    r"\d+\.\d+|\d+-of-\d+|(?:rank|shard|part|version|seed|fold|node|gpu)[-_=]?\d+|20\d\d-?[01]\d-?[0-3]\d.*|1[5-9]\d{8}",
    re.IGNORECASE,
)
"""A loss, a part of several, a date, seconds since 1970."""
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

    `numbers`: those in its name, or in the tracker file, such as epoch and step; none if there are none.
    `time_seconds`: when it was changed last (unix). `is_sure`: it is a checkpoint, and not just a file that may be
    written at each start. `counts`: the numbers are those of a training run, and grow: not the 50 of `resnet_50`.
    """

    path: str
    numbers: tuple[int, ...]
    size_bytes: int
    time_seconds: float
    is_sure: bool = True
    counts: bool = True

    @property
    def step(self) -> int:
        """The step in its name: the last number; 0 if there is none."""
        return self.numbers[-1] if self.numbers and not _REQUEUES.fullmatch(Path(self.path).name) else 0

    def is_after(self, before: Newest | None) -> bool:
        """Return whether this is another checkpoint than the one that was the newest before, and a later one."""
        if before is None:
            return True
        if self.numbers != before.numbers or self.counts:
            return self.numbers > before.numbers
        is_whole = self.size_bytes >= _COMPLETE * before.size_bytes
        return self.path == before.path and self.time_seconds > before.time_seconds and is_whole


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
    since_seconds: float,
    *,
    is_known: bool,
) -> Left:
    """Look for what an attempt left. Raises nothing: what cannot be read is not there.

    Args:
        progress: where the user says that checkpoints are.
        places: where they may be, by the arguments of the program; of no account if the user says it.
        before: the newest checkpoints of earlier attempts, by naming scheme.
        begun_seconds: when the attempt began (unix).
        since_seconds: when the chain began: what is older is of another run.
        is_known: whether the checkpoints of this program have been seen already. Otherwise it may save elsewhere.
    """
    found = find_newest(progress, workdir, since_seconds) if progress else guess_newest(places, workdir, since_seconds)
    recent = sorted(found, key=lambda scheme: found[scheme].time_seconds)[-_MOST_SCHEMES:]
    newest = {scheme: found[scheme] for scheme in recent}
    new = {scheme: each for scheme, each in newest.items() if each.is_after(before.get(scheme))}
    if sure := latest({scheme: each for scheme, each in new.items() if each.is_sure}):
        return Left(True, newest, sure.step)
    if new:
        return Left(None, newest)
    note = ""
    written = latest({scheme: each for scheme, each in newest.items() if each.time_seconds >= begun_seconds})
    if progress and not found:
        note = f"nothing new matches --progress {' '.join(progress)}"
    elif written is not None and written.numbers:
        old = max((each.numbers for scheme, each in before.items() if scheme in found), default=(0,))[-1]
        note = f"it saved step {written.step}, and step {old} was there already"
    return Left(False if is_known or progress else None, newest, note=note)


def later_of(before: Mapping[str, Newest], found: Mapping[str, Newest]) -> dict[str, Newest]:
    """Return the newest checkpoint of each naming scheme, of those before and those found now."""
    later = dict(before)
    for scheme, each in found.items():
        known = before.get(scheme)
        if each.is_after(known):
            later[scheme] = each
        elif known is not None and each.path == known.path:  # a second one of a smaller size is no accident
            later[scheme] = replace(known, size_bytes=each.size_bytes)
    return later


def find_newest(places: Sequence[str], workdir: Path, since_seconds: float = 0.0) -> dict[str, Newest]:
    """Return the newest checkpoints in the places that a user names, by naming scheme. What cannot be read is left out.

    Args:
        places: folders, files and glob patterns, relative to `workdir`. In a folder every known layout is found; what a
            pattern matches are checkpoints or tracker files themselves.
        since_seconds: only what was changed since then (unix).
    """
    found: dict[str, Newest] = {}
    for place in places:
        with suppress(OSError, RuntimeError):  # of a user whom nobody knows
            path = workdir / Path(place).expanduser()
            if glob.has_magic(place) and not os.path.lexists(path):
                pattern = os.path.join(glob.escape(str(workdir)), Path(place).expanduser())
                entries = [(Path(each), ()) for _, each in zip(range(MOST_ENTRIES), _matching(pattern))]
                found |= _newest_of(entries, since_seconds, are_named=True)
            elif _is_folder(path) and not _is_checkpoint(path):
                found |= _newest_of([*_entries_below(path)], since_seconds, are_named=True)
            else:
                found |= _newest_of([(path, ())], since_seconds, are_named=True)
    return found


def guess_newest(places: Sequence[str], workdir: Path, since_seconds: float = 0.0) -> dict[str, Newest]:
    """Return the newest checkpoints where they may be: known layouts in folders, and nothing else."""
    found: dict[str, Newest] = {}
    for place in places:
        with suppress(OSError, RuntimeError):
            path = workdir / Path(place).expanduser()
            if _is_folder(path):
                found |= _newest_of([*_entries_below(path)], since_seconds)
    return found


def _matching(pattern: str) -> Iterator[str]:
    return glob.iglob(pattern, recursive=True)  # noqa: PTH207 of an absolute pattern


def _is_folder(path: str | Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112 Path.is_dir() raises where it may not look


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
            # As in bash -c 'python train.py --save out', and ARGUMENTS="--save out".
            lines += [re.sub(r"^\w+=", "", word).split() for word in lines[-1] if " " in word]
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


_Entry = tuple[Path, tuple[int, ...]]
"""What may be a checkpoint, and the numbers of the folders that hold it, such as an epoch."""


def _entries_below(folder: Path) -> Iterator[_Entry]:
    """Yield what may be checkpoints or tracker files in a folder and some levels below it, nearest first."""
    level: list[_Entry] = [(folder, ())]
    looked = 0
    for _ in range(_DEPTH + 1):
        below: list[_Entry] = []
        for each, numbers in level:
            if _is_folder(each / DOT):
                yield each, ()
                continue
            with suppress(OSError), os.scandir(each) as entries:
                for entry in entries:
                    looked += 1
                    if looked > MOST_ENTRIES:
                        return
                    path, is_folder = Path(entry.path), entry.is_dir(follow_symlinks=False)
                    if is_folder and _UNFINISHED.fullmatch(entry.name):
                        continue
                    if is_folder and (not _is_named_as_one(entry, is_top=each == folder) or _holds_checkpoints(entry)):
                        counted = numbers_of(entry.name) if _COUNTED.search(entry.name) else ()
                        below.append((path, numbers + counted))
                    elif is_folder or entry.name in _TRACKERS or _is_named_as_one(entry, is_top=False):
                        yield path, numbers
        level = below


def _is_named_as_one(entry: os.DirEntry[str], *, is_top: bool) -> bool:
    if _UNFINISHED.fullmatch(entry.name):
        return False
    if entry.is_dir():
        if is_top and entry.name.isdigit():
            return any(os.path.lexists(os.path.join(entry.path, each)) for each in _ORBAX)
        return _FOLDER.fullmatch(entry.name) is not None and bool(numbers_of(entry.name))
    has_suffix = entry.name.lower().endswith(_SUFFIXES)
    return has_suffix or ("." not in entry.name and _COUNTED.search(entry.name) is not None)


def _holds_checkpoints(folder: os.DirEntry[str]) -> bool:
    """Return whether a folder with the name of a checkpoint holds checkpoints, as `epoch_3/step_400.pt`."""
    says_what = _COUNTED.search(folder.name) is not None
    with suppress(OSError), os.scandir(folder) as entries:
        for _, entry in zip(range(_MOST_FILES), entries):
            if entry.name in _TRACKERS and entry.is_file():
                return True
            if (_COUNTED.search(entry.name) or not says_what) and _is_named_as_one(entry, is_top=False):
                return True
    return False


def _is_checkpoint(folder: Path) -> bool:
    """Whether a folder that was named is one checkpoint, and not a place of several."""
    return _FOLDER.fullmatch(folder.name) is not None and not any(_entries_below(folder))


def _newest_of(entries: Sequence[_Entry], since_seconds: float, *, are_named: bool = False) -> dict[str, Newest]:
    """Return the newest complete one of each naming scheme. A tracker file wins over the names beside it."""
    schemes: dict[str, list[Newest]] = {}
    found: dict[str, Newest] = {}
    tracked: set[Path] = set()
    for path, above in entries:
        with suppress(OSError, CkptmanError):
            if _is_folder(path / DOT):
                found |= _newest_of_root(path, since_seconds)
                continue
            status = path.stat()
            if status.st_mtime < since_seconds:
                continue
            scheme = "/".join(("#",) * len(above) + (re.sub(r"\d+", "#", path.name),))
            is_file = stat.S_ISREG(status.st_mode)
            is_tracker = (path.name in _TRACKERS and (is_file or path.is_symlink())) or (
                are_named and is_file and status.st_size < _SMALL_BYTES and not path.name.lower().endswith(_SUFFIXES)
            )
            numbers = _numbers_in_tracker(path) if is_tracker else (*above, *numbers_of(path.name))
            if is_tracker and numbers:
                tracked.add(path.parent)
                tracker = Newest(str(path), numbers, 0, status.st_mtime)
                if tracker.is_after(found.get(scheme)):
                    found[scheme] = tracker
            elif not is_tracker or are_named:
                counts = bool(numbers) and _says_what_it_counts(path, above)
                newest = Newest(str(path), numbers, -1, status.st_mtime, are_named or counts, counts)
                schemes.setdefault(scheme, []).append(newest)
    for scheme, of_scheme in schemes.items():
        left = [each for each in of_scheme if Path(each.path).parent not in tracked]
        if len(left) == 1 and _TRACKED.fullmatch(Path(left[0].path).name):
            continue
        if (complete := _newest_complete(left)) is not None:
            found[scheme] = complete
    return found


def _says_what_it_counts(path: Path, above: Sequence[int]) -> bool:
    """Whether the numbers in a name are those of a training run, and not of a model, a process or a part."""
    name = path.name
    return bool(above) or any((_COUNTED.search(name), _FOLDER.fullmatch(name), name.partition(".")[0].isdigit()))


def _newest_of_root(root: Path, since_seconds: float) -> dict[str, Newest]:
    from ckptman.storage.catalog.catalog import Catalog, any_will_do

    entries = Catalog(root).complete(until=any_will_do)
    last = entries[-1] if entries else None
    if last is None or last.time_seconds < since_seconds:
        return {}
    return {str(root): Newest(str(root), (last.step,), 0, last.time_seconds)}


def _newest_complete(found: Sequence[Newest]) -> Newest | None:
    """Return the newest one, unless it is much smaller than the one before: cut short, or still being written."""
    ordered = sorted(found, key=lambda each: (each.numbers, each.time_seconds))[-3:]
    sized = [replace(each, size_bytes=_bytes(Path(each.path))) for each in ordered]
    sized = [each for each in sized if each.size_bytes > 0]
    if len(sized) > 1 and sized[-1].size_bytes < _COMPLETE * sized[-2].size_bytes:
        return sized[-2]
    return sized[-1] if sized else None


def _bytes(path: Path) -> int:
    """Return how large a checkpoint is; 0 if it is gone by now, or lacks what is written last."""
    total, looked, is_complete = 0, 0, False
    with suppress(OSError):
        if not _is_folder(path):
            return path.stat().st_size
    for folder, _, names in os.walk(path):
        if any(name.endswith(".distcp") for name in names):  # torch.distributed.checkpoint writes its metadata last
            if ".metadata" not in names:
                return 0
            is_complete = True
        for name in names:
            looked += 1
            if looked > _MOST_FILES:
                return _WHOLE_BYTES
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return _WHOLE_BYTES if is_complete else total


def _numbers_in_tracker(path: Path) -> tuple[int, ...]:
    if path.is_symlink():
        return numbers_of(path.readlink().name)
    text = read_regular(path, _MOST_TRACKER_BYTES).decode("ascii", errors="replace").strip()
    return numbers_of(text.splitlines()[0].rpartition("/")[2]) if text else ()


def numbers_of(name: str) -> tuple[int, ...]:
    """Return the numbers in the name of a checkpoint, such as 3 and 400 of `epoch=3-step=400.ckpt`."""
    stem = name
    for suffix in _SUFFIXES:
        stem = stem.removesuffix(suffix)
    return tuple(map(int, _NUMBER.findall(_NOT_A_STEP.sub("", stem))))

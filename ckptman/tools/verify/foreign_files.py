"""What can be proved of the files of the HF Trainer, Accelerate and Lightning: that each is whole, as far as it tells.

A file of torch.save is a zip archive with checksums, safetensors has a header that tells its size, JSON is read, and
plain DCP within is checked as such. Of all others nothing is said but that nobody looked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ckptman.errors import CorruptError
from ckptman.storage.format import safetensors
from ckptman.storage.format.foreign import RANDOM_STATES, TRAINER_STATE, ForeignCheckpoint
from ckptman.storage.format.paths import MANIFEST, METADATA
from ckptman.storage.io.safe_open import open_regular, read_regular
from ckptman.tools.verify.foreign_check import (
    Container,
    ForeignReport,
    Opened,
    account_for,
    check_foreign,
    open_container,
)

_MOST_JSON_BYTES = 256 * 1024 * 1024
_OF_TORCH = (".pt", ".pth", ".bin", ".pkl", ".ckpt")
"""What files of torch.save are called."""
_ZIP = b"PK\x03\x04"
_HEAD_BYTES = 64
_SHOWN = 5


def check_files(found: ForeignCheckpoint, threads: int = 2, done: Callable[[int], None] | None = None) -> ForeignReport:
    """Check each file of a checkpoint. `done` is called with the bytes that were read. Raises: OSError."""
    report = ForeignReport()
    _check_each(found, found.files(), report, threads, done)
    if found.writer == "the HF Trainer":
        report.problems += _problems_of_trainer(found)
    if found.writer != "Lightning":
        report.remarks.append(f"that no file is missing, as {found.writer} keeps no list of them")
    return report


def check_beside(
    found: ForeignCheckpoint, report: ForeignReport, threads: int = 2, done: Callable[[int], None] | None = None
) -> None:
    """Check also what lies beside plain DCP in its folder, such as `meta.pt` of Lightning. Raises: OSError."""
    others = [each for each in found.files() if each.parent != found.path or not _is_of_dcp(each)]
    _check_each(found, others, report, threads, done)


def _check_each(
    found: ForeignCheckpoint,
    files: Sequence[Path],
    report: ForeignReport,
    threads: int,
    done: Callable[[int], None] | None,
) -> None:
    report.files += len(files)
    report.bytes += sum(each.lstat().st_size for each in files)
    in_dcp = {each.parent for each in files if each.name == METADATA}
    ours = in_dcp & {each.parent for each in files if each.name == MANIFEST}
    for folder in sorted(in_dcp - ours):
        _check_dcp(folder, report, threads, done)
    opened: list[Opened] = []
    unknown: list[str] = []
    for path in files:
        if path.parent in ours or (path.parent in in_dcp and _is_of_dcp(path)):
            continue
        name, size, problem = str(path.relative_to(found.path.parent)), path.lstat().st_size, None
        try:
            if path.suffix == ".safetensors":
                problem = safetensors.problem_of(path)
                report.remarks.append(f"{name}: its elements have no checksum: changed ones cannot be found there")
            elif path.suffix == ".json":
                problem = _problem_of_json(path)
            elif path.suffix == ".distcp":
                problem = f"there is no {METADATA} beside it, which DCP writes last: it was not saved to its end"
            elif path.suffix in _OF_TORCH and not (head := _head(path)).strip(b"\0"):
                problem = "it begins with zeros: it was never written" if head else "it is empty"
            elif path.suffix in _OF_TORCH and _ZIP.startswith(head[: len(_ZIP)]):
                opened.append(open_container(path.parent, Container(path.name, 0, size, "the whole file")))
                problem = opened[-1].problem
            else:
                unknown.append(name)
        except CorruptError as error:
            problem = str(error)
        except OSError as error:
            report.unread.append(f"{name} cannot be read: {error.strerror or error}")
        if problem is not None:
            report.problems.append(f"{name}: {problem}")
        if done is not None:
            done(size)
    account_for(report, opened)
    report.remarks += [f"nobody looked into {each}, a checkpoint of ckptman: verify it by its path" for each in ours]
    if unknown:
        more = ", ..." if len(unknown) > _SHOWN else ""
        report.remarks.append(f"nobody looked into {', '.join(unknown[:_SHOWN])}{more}")


def _is_of_dcp(path: Path) -> bool:
    return path.name == METADATA or path.suffix == ".distcp"


def _check_dcp(folder: Path, report: ForeignReport, threads: int, done: Callable[[int], None] | None) -> None:
    try:
        part = check_foreign(folder, threads, done)
    except CorruptError as error:
        report.problems.append(str(error))
        return
    report.tensors += part.tensors
    report.checked_bytes += part.checked_bytes
    report.problems += [f"{folder.name}: {each}" for each in part.problems]
    report.unread += part.unread
    report.remarks += [f"{folder.name}: {each}" for each in part.remarks]


def _head(path: Path) -> bytes:
    with open(open_regular(path, follow=True), "rb") as file:
        return file.read(_HEAD_BYTES)


def _read_json(path: Path) -> Any:
    """Raises: ValueError (it is none), CorruptError, OSError."""
    return json.loads(read_regular(path, _MOST_JSON_BYTES))


def _problem_of_json(path: Path) -> str | None:
    """Return what is wrong with a file of JSON; of an index also which of its files are missing."""
    try:
        found = _read_json(path)
        parts = set(found["weight_map"].values()) if path.name.endswith(".index.json") else set()
        missing = sorted(str(each) for each in parts if not (path.parent / str(each)).is_file())
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        return f"it cannot be read: {error}"
    return f"it names files that are missing: {', '.join(missing[:_SHOWN])}" if missing else None


def _problems_of_trainer(found: ForeignCheckpoint) -> list[str]:
    """Return what is wrong with the state of the Trainer, which it writes last."""
    path = found.path / TRAINER_STATE
    if not path.is_file():
        return [
            f"{TRAINER_STATE} is missing, which the Trainer writes last, and so is {RANDOM_STATES} of Accelerate: it "
            f"was not saved to its end"
        ]
    try:
        step = _read_json(path).get("global_step")
    except (ValueError, RecursionError, AttributeError, CorruptError, OSError):
        return []  # told already, with the other files
    if found.step is not None and step != found.step:
        return [f"{TRAINER_STATE} is of step {step}, and its name of step {found.step}"]
    return []

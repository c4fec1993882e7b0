"""Names under a checkpoint root, in one place. Patterns are anchored: a name that only resembles one is not ours.

step-0000000100              a committed checkpoint
step-0000000100.tmp-X        being written; X tells whose (see `catalog.writer_lock`)
step-0000000100.old-X        stood aside while a new save of the same step takes its name (see `catalog.backends.local`)
step-0000000100.abandoned-X  left behind by a rollback, and its step was saved again since
step-0000000100.trash-X      deleted, being removed
                             X is a tag that ckptman makes (see `_TAG`); with any other, the name is somebody's own
.ckptman/                    the run's own files: journal.jsonl, metrics.jsonl, outcome.json, owner-000001.json,
                             lease-0a1b2c3d.json, rollback-000001.json, tiers.json, drained.json, root.json,
                             tier-of.json, stacks-2-rank00003.txt, wandb-steps.jsonl, ask-save-0a1b2c3d-4e5f6a7b
"""

from __future__ import annotations

import contextlib
import operator
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from ckptman.errors import ConfigError
from ckptman.storage.io.durable_files import RUN_FOLDER

MANIFEST = "manifest.json"
METADATA = ".metadata"
"""torch's own description of the checkpoint (a pickle): written for others, never read in our own checkpoints."""
INDEX = "index.json"
CHUNKS = "chunks.bin"
DOT = RUN_FOLDER
ROOT_ID = "root.json"
TIER_OF = "tier-of.json"
"""Whose a root is, and whose copies it takes (see `catalog.tier_identity`)."""

MEMORY_PATH = "/dev/shm"
"""Where runs keep checkpoints in memory, unless their `MemoryTier` says otherwise."""

Kind = Literal["step", "tmp", "old", "abandoned", "trash"]
# A tag is one that a claim, a lease, a save, a copy or a prune makes. What people add is none: `.old-best`, `.tmp-1`,
# and `.old-20261122-1530`, as a nonce has a letter.
_TAG = r"""
    (?: (?=[0-9]*[a-f])[0-9a-f]{8} | (?:cli|drain|full-|copy-)[0-9a-f]{8} | copy-[0-9a-f]{16} )
    (?: -[0-9]+ ){0,2} (?: -left[0-9]+ )?
"""
_STEP = re.compile(
    rf"step-(?P<step>[0-9]{{10}}) (?: \.(?P<kind>tmp|old|abandoned|trash)-(?P<tag>{_TAG}) )?", re.ASCII | re.VERBOSE
)
_LIKE_STEP = re.compile(r"step-([0-9]{10})\.(?:tmp|old|abandoned|trash)-.+", re.ASCII | re.DOTALL)
_OWNER = re.compile(r"owner-([0-9]{6,})\.json", re.ASCII)
_ROLLBACK = re.compile(r"rollback-([0-9]{6,})\.json", re.ASCII)
_LEASE = re.compile(r"lease-[0-9a-f]{8}\.json", re.ASCII)
_REQUEST = re.compile(r"ask-(?P<what>save|stop|hold)-(?P<claim>[0-9a-f]{8})-(?P<id>[0-9a-f]{8})", re.ASCII)
_HALF_WRITTEN = re.compile(r".+\.tmp-([0-9]+)-[0-9a-f]{8}", re.ASCII | re.DOTALL)
_DATA = re.compile(r"__(0|[1-9][0-9]*)_(0|[1-9][0-9]*)\.distcp", re.ASCII)
_OF_RANK = re.compile(r"__(?P<data>[0-9]+)_0\.distcp|(?:blocks|values)-(?P<other>[0-9]{5,})\.(?:bin|json)", re.ASCII)
MAX_STEP = 10**10 - 1


Ask = Literal["save", "stop", "hold"]
"""The requests of `ckptman ask`."""


class RequestName(NamedTuple):
    """A parsed request to a run. `claim`: the nonce of the claim of the attempt that it is for."""

    what: Ask
    claim: str
    id: str


class StepName(NamedTuple):
    """A parsed folder name."""

    step: int
    kind: Kind
    tag: str


def step_number(step: Any) -> int:
    """Return a step as a plain int; NumPy's and torch's whole numbers are taken too. Raises: ConfigError."""
    try:
        number = operator.index(step)
    except TypeError:
        raise ConfigError(f"a step is a whole number, not {step!r}") from None
    if not 0 <= number <= MAX_STEP:
        raise ConfigError(f"a step is a number from 0 to {MAX_STEP}, not {number}")
    return number


def step_folder(step: int, kind: Kind = "step", tag: str = "") -> str:
    """Return the folder name of a step: `step-0000000100`, or `step-0000000100.tmp-tag`. Raises: ConfigError."""
    if not 0 <= step <= MAX_STEP:
        raise ConfigError(f"a step is a number from 0 to {MAX_STEP}, not {step}: count optimizer steps from 1")
    return f"step-{step:010d}" + ("" if kind == "step" else f".{kind}-{tag}")


@lru_cache(maxsize=2**16)  # a run lists the same names again and again
def parse_step(name: str) -> StepName | None:
    """Return what a folder name says, or None if the name is not one of ours."""
    match = _STEP.fullmatch(name)
    if match is None:
        return None
    kind = cast(Kind, match["kind"] or "step")
    return StepName(int(match["step"]), kind, match["tag"] or "")


def like_step(name: str) -> int | None:
    """Return the step in a name that looks like one of ours and is none, so that somebody gave it by hand; or None."""
    match = _LIKE_STEP.fullmatch(name)
    return int(match[1]) if match and parse_step(name) is None else None


def is_checkpoint(path: Path) -> bool:
    """Return whether a path is one checkpoint of ckptman, complete or not, and not a root."""
    return path.is_dir() and (parse_step(path.resolve().name) is not None or (path / MANIFEST).exists())


def check_is_no_checkpoint(root: Path) -> None:
    """Refuse a single checkpoint where a root is expected: it would look like an empty root. Raises: ConfigError."""
    with contextlib.suppress(PermissionError):  # whoever reads the root says more
        if is_checkpoint(root):
            raise ConfigError(f"{root} is one checkpoint, not a root: name the folder that contains it")


def new_nonce() -> str:
    """Return eight hexadecimal digits for a new tag. One of them is a letter: a date is no tag of ours."""
    while (nonce := os.urandom(4).hex()).isdecimal():
        pass
    return nonce


def data_name(rank: int) -> str:
    """Return the name of the file that holds the tensors of one rank, as plain DCP names it."""
    return f"__{rank}_0.distcp"


def blocks_name(rank: int) -> str:
    """Return the name of the file that holds the block digests of one rank's data file."""
    return f"blocks-{rank:05d}.bin"


def parse_data(name: str) -> tuple[int, int] | None:
    """Return the rank that wrote a data file, and which of its files it is; None if the name is none of DCP's.

    ckptman writes one a rank, number 0; plain DCP may write more.
    """
    match = _DATA.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def digests_name(data_file: str) -> str | None:
    """Return the name of the file that holds the digests of a data file; None where it has none of DCP's names."""
    parsed = parse_data(data_file)
    if parsed is None:
        return None
    rank, number = parsed
    return f"blocks-{rank:05d}-{number}.bin" if number else blocks_name(rank)


def values_name(rank: int) -> str:
    """Return the name of the file that holds the plain values that only one rank has."""
    return f"values-{rank:05d}.json"


def rank_of(name: str) -> int | None:
    """Return the rank of a file of `data_name`, `blocks_name` or `values_name`; None for other names."""
    match = _OF_RANK.fullmatch(name)
    return int(match["data"] or match["other"]) if match else None


def user_folder(base: Path) -> Path:
    """Return where all that this user has in the memory of a node is. `base`: such as `MEMORY_PATH`."""
    return base / f"ckptman-{os.getuid()}"


def run_folder(root: Path) -> Path:
    """Return where a run keeps what is not a checkpoint."""
    return root / DOT


def journal_path(root: Path) -> Path:
    """Return where the run journal is, one JSON object per line."""
    return root / DOT / "journal.jsonl"


def metrics_path(root: Path) -> Path:
    """Return the path of the log of a run's metrics."""
    return root / DOT / "metrics.jsonl"


def outcome_path(root: Path) -> Path:
    """Return where it is noted how the last attempt ended."""
    return root / DOT / "outcome.json"


def stacks_path(root: Path, attempt: int, rank: int) -> Path:
    """Return where the stacks are of all threads of a rank that the watchdog found stuck."""
    return root / DOT / f"stacks-{attempt}-rank{rank:05d}.txt"


def owner_path(root: Path, number: int) -> Path:
    """Return where a claim on this root is: the highest number is the one that counts (see `catalog.writer_lock`)."""
    return root / DOT / f"owner-{number:06d}.json"


def parse_owner(name: str) -> int | None:
    """Return the number of a claim, or None if the name is not that of one."""
    match = _OWNER.fullmatch(name)
    return int(match[1]) if match else None


def tiers_path(root: Path) -> Path:
    """Return where it is noted where copies of a run's checkpoints go (see `catalog.tiers`)."""
    return root / DOT / "tiers.json"


def drained_path(root: Path) -> Path:
    """Return where it is noted what the tiers held when a drain looked last (see `catalog.tiers`)."""
    return root / DOT / "drained.json"


def rollback_path(root: Path, number: int) -> Path:
    """Return where a rollback of this root is noted (see `catalog.rollback_records`)."""
    return root / DOT / f"rollback-{number:06d}.json"


def parse_rollback(name: str) -> int | None:
    """Return the number of a rollback, or None if the name is not that of one."""
    match = _ROLLBACK.fullmatch(name)
    return int(match[1]) if match else None


def retention_path(root: Path) -> Path:
    """Return where the retention policy of the run is (see `catalog.stored_policy`)."""
    return root / DOT / "retention.json"


def lease_path(root: Path, nonce: str) -> Path:
    """Return where the lease of a reader or a copy is while it is at work (see `catalog.reader_lease`)."""
    return root / DOT / f"lease-{nonce}.json"


def is_lease(name: str) -> bool:
    """Return whether a name is that of a lease."""
    return _LEASE.fullmatch(name) is not None


def request_path(root: Path, request: RequestName) -> Path:
    """Return the path of a request to a run (see `runtime.requests`)."""
    return root / DOT / "-".join(("ask", *request))


def is_like_request(name: str) -> bool:
    """Return whether a name begins as that of a request."""
    return name.startswith("ask-")


def parse_request(name: str) -> RequestName | None:
    """Return the request in a name, or None if the name is not that of one."""
    match = _REQUEST.fullmatch(name)
    return RequestName(cast(Ask, match["what"]), match["claim"], match["id"]) if match else None


def parse_half_written(name: str) -> int | None:
    """Return the pid in the name of a file that `Disk.replace_file` was writing, or None if it is no such name."""
    match = _HALF_WRITTEN.fullmatch(name)
    return int(match[1]) if match else None

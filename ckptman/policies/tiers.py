"""Places further away where some of a run's checkpoints go too: which of them, and why.

Tier("/project/run/checkpoints", every=4, retention=KeepLast(10))
Tier("s3://archive/run", retention=KeepBest("loss"))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ckptman.errors import ConfigError, masked_address, plain
from ckptman.policies.parameters import check_count, check_positive
from ckptman.policies.retention_rules import Record, RetentionPolicy, needs_capacity, newest_finite, sequence_of


class AsPath(Protocol):
    """What `pathlib.Path` is, without looking at a disk."""

    def __fspath__(self) -> str: ...


@dataclass(frozen=True)
class Tier:
    """Describe a place for copies of a run's checkpoints.

    Args:
        path: a folder, or the address of an object store such as `s3://bucket/prefix`. It belongs to one tier of
            one root: that of another run is refused.
        every: every N-th commit of the run's root is a candidate.
        retention: candidates that it would keep are copied, and while the newest of them is not finite, the newest that
            is; and it prunes the tier after a copy. None: all are copied,
            and nothing is deleted.
        bytes_per_second: the most that a copy may take; None: no limit.

    Raises:
        ConfigError: the path is no address, holds a secret, or the retention policy does not fit a tier.
        IntervalError: `every` is less than 1, or `bytes_per_second` is not above 0.
    """

    path: str | AsPath
    every: int = 1
    retention: RetentionPolicy | None = None
    bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        path = self.path if isinstance(self.path, str) else getattr(self.path, "__fspath__", lambda: None)()
        if not isinstance(path, str) or not path:
            raise ConfigError(f"Tier: path must be a folder, or an address such as s3://bucket/run, not {self.path!r}")
        if masked_address(path) != path:
            raise ConfigError(
                f"Tier: {plain(masked_address(path))} has a secret in it, and an address is shown and stored: take it "
                f"out, and give credentials in the environment, such as AWS_PROFILE"
            )
        object.__setattr__(self, "path", path)
        check_count("Tier", "every", self.every, "to copy nothing, leave the tier away")
        if self.retention is not None and not isinstance(self.retention, RetentionPolicy):
            raise ConfigError(f"Tier: retention must be a retention policy such as KeepLast(3), not {self.retention!r}")
        if needs_capacity(self.retention):
            raise ConfigError("Tier: a limit in percent is one of the disk that the root is on: say AtMost(bytes=...)")
        if self.bytes_per_second is not None:
            check_positive("Tier", "bytes_per_second", self.bytes_per_second)

    def __str__(self) -> str:
        return str(self.path)


def due(records: Sequence[Record], there: Sequence[Record], tier: Tier, now_seconds: float) -> dict[int, str]:
    """Return what of a root has still to be copied to a tier: the index of each in `records`, with the reason.

    `there`: what the tier holds; what is damaged there is copied again. What is damaged or abandoned in the root is not
    copied. Called by drains, and by prunes of the root, which leave alone what is due.
    """
    good = [record for record in there if not record.damaged]
    known = {_key(record) for record in good}
    new = {
        place: record
        for place, record in enumerate(records)
        if record.sequence % tier.every == 0
        and not record.damaged
        and not record.abandoned
        and _key(record) not in known
    }
    if tier.retention is None:
        rule = "every commit" if tier.every == 1 else f"every {tier.every} commits"
        return dict.fromkeys(new, rule)
    counted = [*(record for record in good if not record.abandoned), *new.values()]
    wanted = tier.retention.keeps_at(counted, now_seconds)
    kept = [record for record in counted if record.sequence in wanted]
    if kept and max(kept, key=sequence_of).nonfinite_reason:  # what goes there is to be of use
        wanted = newest_finite(counted) | wanted
    return {place: wanted[record.sequence] for place, record in new.items() if record.sequence in wanted}


def _key(record: Record) -> tuple[int, int, float]:
    return record.step, record.sequence, record.time_seconds

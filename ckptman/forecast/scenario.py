"""The run that `ckptman plan` plans: a model, where it trains and is saved, how often it fails; and its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ckptman.errors import ConfigError
from ckptman.forecast.figures import Figure, time_text
from ckptman.policies.parameters import check_count
from ckptman.policies.retention_rules import RetentionPolicy

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
MOST_GPUS = 200_000
IN_MEMORY = ("shm", "ram", "tmpfs", "memory", "dev-shm")

_RULE_SOURCE = "the rule of thumb of teams on Leonardo, LUMI and SuperPOD, 2024: 7B at 16 bit is 70 GB"
_TENSOR_BYTES, _PIECE_BYTES, _RANK_BYTES = 21_500, 2_500, 52_000
"""What files hold besides elements: for a trained tensor (11 plain values of AdamW, a step), a piece of a tensor, and a
rank (its RNG state). Digests are 16 bytes for each block of 128 KiB."""

RATES = {
    "llama3": (
        54 * 24 * 16_384 / 419,
        "419 unexpected interruptions in 54 days on 16,384 GPUs",
        "Grattafiori et al., The Llama 3 Herd of Models, arXiv 2407.21783, 2024",
    ),
    "rsc1": (
        1000 * 24 * 8 / 6.5,
        "6.5 failures in 1,000 days of nodes of 8 GPUs",
        "Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters, arXiv 2410.21680",
    ),
}
"""Published failure rates: GPU hours from one failure to the next, how they were counted, and by whom."""


@dataclass(frozen=True)
class Model:
    """What is trained. `other_bytes`: saved without moments, such as frozen parameters and buffers.

    `tensors`: how many are trained, and `saved_tensors` with their moments and the others; 0 if only the number of
    parameters is known.
    """

    title: str
    parameters: int
    parameter_bytes: int
    moment_bytes: int
    frozen: int = 0
    other_bytes: int = 0
    tensors: int = 0
    saved_tensors: int = 0


@dataclass(frozen=True)
class Tier:
    """A storage location, and what the whole run writes and reads there. `formula`: where the rate comes from."""

    name: str
    write_bytes_per_second: float
    read_bytes_per_second: float
    formula: str

    @property
    def lasts(self) -> bool:
        """Whether it outlives a node, judged by its name."""
        return self.name.lower() not in IN_MEMORY


@dataclass(frozen=True)
class Memory:
    """Checkpoints in the memory of the nodes, each part on `copies` of them.

    `interval_seconds`: None saves as often as costs 1 % of the time. `restart_seconds`: of a restart inside the
    allocation; None: a start without the queue. `survived`: share of the failures that memory survives.
    """

    interval_seconds: float | None
    copies: int
    exchange_bytes_per_second: float
    restart_seconds: float | None
    survived: float
    host_bytes: int | None


@dataclass(frozen=True)
class Scenario:
    """A run to plan: what `ckptman plan` was given, and what it assumes. `factor`: of the interval by init time."""

    model: Model
    nodes: int
    gpus_per_node: int
    tiers: tuple[Tier, ...]
    staging_bytes_per_second: float
    blocking: bool
    init_seconds: float
    factor: float
    notice_seconds: float
    queue_seconds: float
    mtbf_seconds: float
    run_seconds: float
    step_seconds: float | None
    retention: RetentionPolicy | None
    in_memory: Memory | None

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @cached_property
    def size(self) -> dict[str, Figure]:
        """The size of a checkpoint, by the rule of thumb and by what is known of the tensors."""
        model = self.model
        count, item = model.parameters, max(1, round(model.parameter_bytes / model.parameters))
        moment, pieces = model.moment_bytes / count, model.saved_tensors * self.gpus_per_node
        elements = model.parameter_bytes + model.moment_bytes + model.other_bytes
        known = f"{model.tensors:,} x 21.5 kB + {pieces:,} pieces x 2.5 kB + {self.gpus:,} ranks x 52 kB"
        besides = model.tensors * _TENSOR_BYTES + pieces * _PIECE_BYTES + self.gpus * _RANK_BYTES
        parts = f"{count:,} x ({item} + {moment:g}) B: parameters and moments"
        if model.other_bytes:
            parts += f", and {model.other_bytes:,} B of others"
        found = [
            Figure("rule", 5 * count * item, "bytes", f"5 x {count:,} parameters x {item} B  [{_RULE_SOURCE}]"),
            Figure("tensors", elements, "bytes", parts),
            Figure("files", round(elements * 8193 / 8192) + besides, "bytes", f"tensors x 8193/8192 + {known}"),
        ]
        return {each.name: each for each in found[: 3 if model.tensors else 2]}

    @property
    def checkpoint_bytes(self) -> int:
        return int([*self.size.values()][-1].value)

    @property
    def rank_bytes(self) -> int:
        """The part of a checkpoint that one rank writes: the ranks share it evenly."""
        return -(-self.checkpoint_bytes // self.gpus)


def mtbf_figure(gpus: int, rate: str) -> Figure:
    """Return the mean time between failures of `gpus` GPUs at a published rate: each failure stops the run.

    Raises: ConfigError, IntervalError.
    """
    check_count("failures", "--gpus", gpus)
    if gpus > MOST_GPUS:
        raise ConfigError(f"{gpus:,} GPUs are more than any machine has: at most {MOST_GPUS:,}")
    if rate not in RATES:
        raise ConfigError(
            f"no published rate {rate!r}; there are {', '.join(RATES)}; or give your own mean time with --mtbf"
        )
    hours, how, source = RATES[rate]
    seconds = hours * 3600 / gpus
    scaled = f"one in {hours:,.0f} GPU hours; / {gpus:,} GPU{'s' if gpus > 1 else ''} = {time_text(seconds)}"
    return Figure("mtbf", seconds, "seconds", f"{how}: {scaled}  [{source}. Scaled, not measured]")

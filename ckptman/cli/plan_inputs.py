"""What `ckptman plan` is about: a model, by its number of parameters, a configuration or a function; and the tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptman.cli.options import parse_count, parse_rate
from ckptman.errors import CkptmanError, ConfigError
from ckptman.forecast.checkpoint_size import (
    DTYPE_BYTES,
    RULE_FACTOR,
    RULE_SOURCE,
    SCHEDULED_VALUES,
    SavedTensor,
    SavedValues,
    checkpoint_size,
    frozen,
    parameter_count,
    rule_bytes,
    state_bytes,
    with_optimizer,
)
from ckptman.forecast.failure_rates import MOST_GPUS
from ckptman.forecast.figures import Figure
from ckptman.forecast.gpu_memory import Batch, Shape, Weights, likely_shape
from ckptman.forecast.save_costs import TABLE, TABLE_SOURCE, TierRates
from ckptman.policies.memory_tier import MemoryTier
from ckptman.policies.parameters import check_count
from ckptman.policies.retention_rules import RetentionPolicy, size_text
from ckptman.policies.save_policies import SavePolicy

DEFAULT_VOCAB = 128_256
DEFAULT_SEQUENCE = 4096
MOST_MOMENTS = 100
_MOST = {
    "nodes": MOST_GPUS,
    "gpus": MOST_GPUS,
    "shard": MOST_GPUS,
    "sequence": 10**9,
    "micro_batch": 10**6,
    "vocab": 10**9,
    "dim": 10**6,
    "layers": 10**5,
}
"""What is more was a slip, and overflows."""
_VALUES_OF_LOOP = (
    *("scheduler.base_lrs", "scheduler.last_epoch", "scheduler._step_count", "scheduler._is_initial"),
    *("scheduler._get_lr_called_within_step", "scheduler._last_lr", "scheduler.lr_lambdas"),
    *("data.position", "data.seed", "data.global_batch", "data.sequence_tokens", "data.digest"),
)
"""Plain values in the state of the bundled loop, besides those of its optimizer."""


@dataclass(frozen=True)
class PlanOptions:
    """Options as they were typed; None: left out."""

    params: str | None
    config: Path | None
    model: str | None
    changes: Sequence[str] | None
    dtype: str | None
    moments: int
    moment_dtype: str | None
    nodes: int
    gpus: int
    shard: int | None
    sequence: int | None
    micro_batch: int | None
    vocab: int | None
    dim: int | None
    layers: int | None


@dataclass(frozen=True)
class Subject:
    """The model, and how it is trained. `total_bytes` of a checkpoint, `largest_bytes` what one rank writes of it."""

    title: str
    weights: Weights
    shape: Shape
    batch: Batch
    replicas: int
    checkpoint: list[Figure]
    total_bytes: int
    largest_bytes: int
    retention: RetentionPolicy | None = None
    save_policy: SavePolicy | None = None
    memory: MemoryTier | None = None

    @property
    def gpus(self) -> int:
        return self.replicas * self.weights.shards


def subject_of(written: PlanOptions) -> Subject:
    """Raises: ConfigError, NotFoundError."""
    given = [name for name in ("params", "config", "model") if getattr(written, name) is not None]
    if len(given) != 1:
        which = "nothing is" if not given else f"{' and '.join('--' + each for each in given)} are"
        raise ConfigError(f"{which} given: name one of --params 9e9, --config FILE, --model package.module:function")
    for name, most in _MOST.items():
        if (value := getattr(written, name)) is not None:
            check_count("plan", f"--{name.replace('_', '-')}", value)
            _check_most(f"--{name.replace('_', '-')}", value, most)
    if written.nodes * written.gpus > MOST_GPUS:
        raise ConfigError(f"{written.nodes * written.gpus:,} GPUs are more than any machine has: at most {MOST_GPUS:,}")
    if not 0 <= written.moments <= MOST_MOMENTS:
        raise ConfigError(
            f"--moments: 0 or more tensors for each parameter (AdamW has 2), at most {MOST_MOMENTS}, not "
            f"{written.moments}"
        )
    if written.changes and written.config is None:
        raise ConfigError("--set changes a key of --config FILE: name that file, too")
    for option, dtype in (("--dtype", written.dtype), ("--moment-dtype", written.moment_dtype)):
        if dtype is not None and dtype not in DTYPE_BYTES:
            raise ConfigError(f"{option}: one of {', '.join(DTYPE_BYTES)}, not {dtype!r}")
        if dtype is not None and written.params is None:
            what = "the bundled loop trains in float32" if written.config else "the model says its own"
            raise ConfigError(f"{option} goes with --params: {what}")
    if written.params is not None:
        return _of_params(written, written.params)
    return _of_model(written, written.model) if written.model is not None else _of_config(written)


def _mesh(written: PlanOptions, shard: int | None) -> tuple[int, int]:
    """(replicas, shards) as the bundled loop lays ranks out. Raises: ConfigError for a --shard that cannot be."""
    from ckptman.train.launch import mesh_shape

    world = written.nodes * written.gpus
    replicas, shards = mesh_shape(world, [written.gpus], shard)
    if written.shard is not None and shards != written.shard:
        raise ConfigError(
            f"--shard {written.shard}: {world} GPUs on nodes of {written.gpus} cannot be cut into groups of that size; "
            f"{shards} would do"
        )
    return replicas, shards


def _of_params(written: PlanOptions, params: str) -> Subject:
    count = parse_count("--params", params)
    dtype = written.dtype or "float32"
    item = DTYPE_BYTES[dtype]
    moment = DTYPE_BYTES[written.moment_dtype or dtype]
    replicas, shards = _mesh(written, written.shard)
    total = state_bytes(count, item, written.moments, moment)
    figures = [
        _rule(count, item),
        Figure(
            "tensors",
            total,
            "bytes",
            f"{count:,} x ({item} + {written.moments} x {moment}) B: parameters and {written.moments} moments",
        ),
    ]
    return Subject(
        f"{count:,} parameters in {dtype}",
        Weights(count, item, written.moments * moment, shards),
        _shape(written, count),
        _batch(written),
        replicas,
        figures,
        total,
        -(-total // (replicas * shards)),
    )


def _check_most(name: str, value: int, most: int) -> None:
    if value > most:
        raise ConfigError(f"{name}: at most {most:,}; what is more was a slip")


def _of_config(written: PlanOptions) -> Subject:
    from ckptman.train.config import load_config
    from ckptman.train.dataset.tokenfile import read_meta
    from ckptman.train.setup import parameter_shapes

    for name in ("vocab", "dim", "layers", "sequence", "micro_batch"):
        if getattr(written, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is in the configuration: change it there, or with --set")
    assert written.config is not None
    config = load_config(written.config, written.changes or ())
    vocab = config.model.vocab_size
    if vocab is None:
        try:
            vocab = read_meta(config.data.path).vocab_size
        except CkptmanError as error:
            raise ConfigError(f"{error}; or say --set model.vocab_size=N, and the tokens are not looked at") from error
    model, data = config.model, config.data
    for name, value, kind in (
        ("model.dim", model.dim, "dim"),
        ("model.ffn_dim", model.hidden_dim, "dim"),
        ("model.layers", model.layers, "layers"),
        ("model.vocab_size", vocab, "vocab"),
        ("data.sequence_tokens", data.sequence_tokens, "sequence"),
        ("data.micro_batch", data.micro_batch, "micro_batch"),
    ):
        _check_most(name, value, _MOST[kind])
    replicas, shards = _mesh(written, written.shard or config.parallel.shard_ranks)
    names = [SavedTensor(name, shape) for name, shape in parameter_shapes(model, vocab)]
    share = -(-data.global_batch // (replicas * shards))
    subject = _exactly(
        f"{parameter_count(names):,} parameters of {written.config}",
        names,
        SavedValues(SCHEDULED_VALUES, _VALUES_OF_LOOP),
        Shape(model.dim, model.layers, vocab, model.hidden_dim, model.kv_heads / model.heads, tied=model.tied),
        Batch(data.micro_batch * data.sequence_tokens, DTYPE_BYTES[config.parallel.compute_dtype]),
        (replicas, shards),
        written.moments,
        accumulates=share > data.micro_batch,
    )
    checkpoint = config.checkpoint
    return replace(
        subject,
        retention=checkpoint.retention(),
        save_policy=checkpoint.save_policy(),
        memory=checkpoint.memory_tier(),
    )


def _of_model(written: PlanOptions, model: str) -> Subject:
    from ckptman.engine.state.meta_model import tensors_of

    names = tensors_of(model)
    trained, others = parameter_count(names), sum(each.elements for each in frozen(names))
    also = f" and {others:,} frozen" if others else ""
    return _exactly(
        f"{trained:,} trained{also} parameters of {model}",
        names,
        SavedValues(),
        replace(_shape(written, trained + others), tied=any(each.tied for each in names)),
        _batch(written),
        _mesh(written, written.shard),
        written.moments,
    )


def _exactly(
    title: str,
    names: list[SavedTensor],
    values: SavedValues,
    shape: Shape,
    batch: Batch,
    mesh: tuple[int, int],
    moments: int,
    accumulates: bool = False,
) -> Subject:
    """A model whose tensors are known one by one, so that the size of its checkpoints is known to the byte, nearly."""
    replicas, shards = mesh
    tensors = with_optimizer(names, moments)
    size = checkpoint_size(tensors, values, replicas, shards)
    trained = [each for each in names if each.parameter]
    count = parameter_count(names)
    item = max(1, round(sum(each.bytes for each in trained) / count))
    ranks = replicas * shards
    figures = [
        _rule(count, item),
        Figure("tensors", size.payload, "bytes", f"the elements of {len(tensors):,} tensors, optimizer and all"),
        Figure(
            "data_files",
            size.data,
            "bytes",
            f"{ranks:,} files: {size.chunks:,} pieces of tensors, each in an archive of torch.save, and plain values",
        ),
        Figure("digests", size.digests, "bytes", "16 B for each 128 KiB of the data files"),
        Figure("descriptions", size.texts, "bytes", "index.json, .metadata, chunks.bin, random states, manifest.json"),
        Figure("files", size.total, "bytes", "data files + digests + descriptions"),
    ]
    moment_bytes = round(sum(each.bytes for each in trained) * moments / count)
    still = frozen(names)
    frozen_count, frozen_bytes = sum(each.elements for each in still), sum(each.bytes for each in still)
    weights = Weights(count, item, moment_bytes, shards, accumulates, frozen_count, frozen_bytes)
    return Subject(title, weights, shape, batch, replicas, figures, size.total, size.largest)


def _rule(count: int, item: int) -> Figure:
    formula = f"{RULE_FACTOR} x {count:,} parameters x {item} B"
    return Figure("rule", rule_bytes(count, item), "bytes", formula, RULE_SOURCE)


def _shape(written: PlanOptions, count: int) -> Shape:
    return likely_shape(count, written.vocab or DEFAULT_VOCAB, written.dim, written.layers)


def _batch(written: PlanOptions) -> Batch:
    return Batch((written.micro_batch or 1) * (written.sequence or DEFAULT_SEQUENCE))


def tiers_of(written: Sequence[str], nodes: int, gpus: int) -> list[TierRates]:
    """Parse `NAME=2GB/s`, `NAME=2GB/s/node`, `NAME=2GB/s/gpu`, and `NAME=DIR`, which is measured.

    Each may end in `:10GB/s`, the most that the whole file system gives. Without any: the practitioners' table.
    Raises: ConfigError, NotFoundError, RootError.
    """
    tiers = [_tier(each, nodes, gpus) for each in written]
    names = [each.name for each in tiers]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"--tier: {twice[0]} is given twice; give each tier a name of its own")
    return tiers or [TierRates(name, rate, rate, f"{size_text(rate)}/s in all", TABLE_SOURCE) for name, rate in TABLE]


def _tier(written: str, nodes: int, gpus: int) -> TierRates:
    name, equals, what = written.partition("=")
    if not (equals and name.strip() and what.strip()):
        raise ConfigError(f"--tier: NAME=RATE or NAME=DIR, as in scratch=2GB/s or scratch=/scratch/me, not {written!r}")
    most: float | None = None
    head, colon, tail = what.rpartition(":")
    if colon and tail[:1].isdigit():
        most, what = parse_rate(f"--tier {name}", tail), head
    if what[:1].isdigit() or what[:1] in "-+.":
        times, per = 1, "in all"
        for ending, count, noun in (("/node", nodes, "nodes"), ("/gpu", gpus, "GPUs")):
            if what.endswith(ending):
                what, times, per = what.removesuffix(ending), count, f"x {count} {noun}"
        write = read = parse_rate(f"--tier {name}", what)
        how, source = f"{size_text(write)}/s {per}", "as given"
    else:
        write, read = _measured(name, Path(what))
        times, how = nodes, f"{size_text(write)}/s of this node" + (f" x {nodes} nodes" if nodes > 1 else "")
        source = f"measured in {what}; ckptman doctor"
    write, read = write * times, read * times
    if most is not None:
        write, read, how = min(write, most), min(read, most), f"{how}, at most {size_text(most)}/s"
    return TierRates(name, write, read, how, source)


def _measured(name: str, folder: Path) -> tuple[float, float]:
    """Return the bytes per second that this node writes and reads there."""
    from ckptman.tools.doctor.examine import examine

    found = {each.name: each.figures for each in examine(folder)}
    write, read = (found.get(each, {}).get("bytes_per_second") for each in ("write", "read"))
    if not write:
        raise ConfigError(f"--tier {name}: {folder} could not be measured: ckptman doctor {folder} says why")
    return float(write), float(read or write)

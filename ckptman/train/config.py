"""The configuration of the bundled loop: one TOML file, checked as a whole before any process group is made.

Every key is in the models below, in the order of the file; `examples/run.toml` shows them with their defaults.
`load_config` finds unknown keys, wrong values and values that do not fit together, and reports all of them at once.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from ckptman.errors import ConfigError, NotFoundError, UnknownKeyError
from ckptman.policies.retention_plan import KeepBest, KeepEvery, KeepLast, RetentionPolicy
from ckptman.policies.save_policies import (
    BeforeDeadline,
    DalyInterval,
    EverySeconds,
    EverySteps,
    InitTimeInterval,
    OnStop,
    SavePolicy,
)
from ckptman.policies.tiers import MemoryTier
from ckptman.storage.format.paths import MEMORY_PATH

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class Section(BaseModel):
    """A table of the file. Keys that are not named here are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelConfig(Section):
    """A Llama-style decoder. `vocab_size` is that of the tokens unless given; it may be larger, not smaller."""

    dim: int = Field(default=256, gt=0)
    layers: int = Field(default=4, gt=0)
    heads: int = Field(default=8, gt=0)
    kv_heads: int = Field(default=4, gt=0)
    ffn_dim: int | None = Field(default=None, gt=0)
    vocab_size: int | None = Field(default=None, gt=0)
    rope_theta: float = Field(default=10_000.0, gt=0)
    norm_eps: float = Field(default=1e-5, gt=0)
    tied: bool = True
    dropout: float = Field(default=0.0, ge=0, lt=1)

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def hidden_dim(self) -> int:
        """Width of the SwiGLU: `ffn_dim`, or 8/3 of `dim` rounded up to a multiple of 64 (as in Llama)."""
        return self.ffn_dim or -(-self.dim * 8 // (3 * 64)) * 64


class DataConfig(Section):
    """A folder made by `python -m ckptman.train.tokenize`, and how it is cut. One sample is `sequence_tokens` long."""

    path: Path
    sequence_tokens: int = Field(default=512, gt=0)
    global_batch: int = Field(default=32, gt=0)
    micro_batch: int = Field(default=4, gt=0)


class OptimizerConfig(Section):
    """AdamW (decay on matrices only), cosine schedule with linear warm-up, global gradient clipping."""

    learning_rate: float = Field(default=3e-4, gt=0)
    final_fraction: float = Field(default=0.1, ge=0, le=1)
    warmup_steps: int = Field(default=100, ge=0)
    weight_decay: float = Field(default=0.1, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    clip_norm: float = Field(default=1.0, gt=0)


class ParallelConfig(Section):
    """Hybrid sharding: shard over `shard_ranks` neighbours (a node's worth unless given), replicate over the rest."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    shard_ranks: int | None = Field(default=None, gt=0)
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    activation_checkpointing: bool = False


class RunConfig(Section):
    """How long, how random, how loud. `peak_tflops` (of one GPU, dense) overrides the table that MFU is taken from."""

    steps: int = Field(gt=0)
    seed: int = Field(default=1, ge=0, lt=2**31)
    deterministic: bool = True
    log: Path | None = None
    log_every: int = Field(default=10, gt=0)
    peak_tflops: float | None = Field(default=None, gt=0)
    time_limit_seconds: float | None = Field(default=None, gt=0)
    timeout_seconds: float = Field(default=1800, gt=0)
    watchdog_seconds: Annotated[float, Field(gt=0)] | Literal["auto", "off"] = "auto"


class CheckpointConfig(Section):
    """When to save and what to keep.

    A stop signal and the deadline always save. Of the intervals, those that are given are combined; with none given
    it is `save_factor = 4`: four times the measured initialisation. With no keep rule every checkpoint is kept.
    `memory`: save to the memory of the nodes, too, every `memory_steps` or as often as costs 1 % of the time.
    """

    root: Path
    async_save: bool = True
    save_factor: float | None = Field(default=None, gt=0)
    min_seconds: float = Field(default=0, ge=0)
    max_seconds: float = Field(default=900, gt=0)
    every_steps: int | None = Field(default=None, gt=0)
    every_seconds: float | None = Field(default=None, gt=0)
    mtbf_seconds: float | None = Field(default=None, gt=0)
    margin_seconds: float = Field(default=30, ge=0)
    keep_last: int | None = Field(default=None, gt=0)
    keep_every: int | None = Field(default=None, gt=0)
    keep_best: int | None = Field(default=None, gt=0)
    memory: bool = False
    memory_steps: int | None = Field(default=None, gt=0)
    memory_copies: int = Field(default=2, gt=0)
    memory_path: Path = Path(MEMORY_PATH)

    def memory_tier(self) -> MemoryTier | None:
        """Return what is kept in memory; None: nothing. Raises: ConfigError."""
        if not self.memory:
            return None
        policy = EverySteps(self.memory_steps) if self.memory_steps is not None else None
        return MemoryTier(policy, self.memory_copies, self.memory_path)

    def save_policy(self) -> SavePolicy:
        """Return the save policy. Raises IntervalError."""
        bounds = {"min_seconds": self.min_seconds, "max_seconds": self.max_seconds}
        intervals: list[SavePolicy] = []
        if self.every_steps is not None:
            intervals.append(EverySteps(self.every_steps))
        if self.every_seconds is not None:
            intervals.append(EverySeconds(self.every_seconds))
        if self.mtbf_seconds is not None:
            intervals.append(DalyInterval(mtbf_seconds=self.mtbf_seconds, **bounds))
        if self.save_factor is not None or not intervals:
            intervals.append(InitTimeInterval(factor=self.save_factor or 4, **bounds))
        return reduce(or_, intervals, OnStop() | BeforeDeadline(margin_seconds=self.margin_seconds))

    def retention(self) -> RetentionPolicy | None:
        """Return the union of the keep rules; None keeps all. `keep_best` ranks by the loss, smallest first."""
        rules: list[RetentionPolicy] = []
        if self.keep_last is not None:
            rules.append(KeepLast(self.keep_last))
        if self.keep_every is not None:
            rules.append(KeepEvery(steps=self.keep_every))
        if self.keep_best is not None:
            rules.append(KeepBest("loss", count=self.keep_best))
        return reduce(or_, rules) if rules else None


class Config(Section):
    """The whole file."""

    model: ModelConfig = ModelConfig()
    data: DataConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    parallel: ParallelConfig = ParallelConfig()
    run: RunConfig
    checkpoint: CheckpointConfig


def load_config(path: Path, changes: Sequence[str] = ()) -> Config:
    """Read and check a TOML file, with `section.key=value` changes on top. Called by every rank.

    Raises NotFoundError for a missing file, UnknownKeyError, and ConfigError with one line per wrong value.
    """
    document = read_toml(path)
    for change in changes:
        _apply(document, change)
    return check_config(document)


def read_toml(path: Path) -> dict[str, Any]:
    """Return what the TOML file of a `--config` says. Raises NotFoundError, ConfigError."""
    try:
        return dict(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise NotFoundError(f"no configuration file {path}: give the path of a TOML file to --config") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from error


def check_config(document: Mapping[str, Any]) -> Config:
    """Return a checked Config from a mapping of sections. Raises as `load_config` does."""
    try:
        config = Config.model_validate(document)
    except pydantic.ValidationError as error:
        raise _explain(error) from None
    if problems := _misfits(config):
        raise _as_error(problems)
    config.checkpoint.save_policy()
    config.checkpoint.retention()
    config.checkpoint.memory_tier()
    return config


def _apply(document: dict[str, Any], change: str) -> None:
    name, equals, text = change.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"--set {change}: write it as section.key=value, for example --set run.steps=300")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word is a string, so that paths need no quotes inside the shell's quotes
    table = document.setdefault(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"--set {change}: [{section}] is not a table in the configuration file")
    table[key] = value


def _misfits(config: Config) -> list[str]:
    """Return what is wrong between values that are each valid."""
    model, checkpoint = config.model, config.checkpoint
    problems = []
    if model.dim % model.heads:
        problems.append(f"model.dim: {model.dim} is not a multiple of model.heads ({model.heads})")
    elif model.head_dim % 2:
        problems.append(f"model.heads: heads are {model.head_dim} wide; rotary embeddings need an even width")
    if model.heads % model.kv_heads:
        problems.append(f"model.kv_heads: {model.kv_heads} does not divide model.heads ({model.heads})")
    if checkpoint.min_seconds > checkpoint.max_seconds:
        problems.append(
            f"checkpoint.min_seconds: {checkpoint.min_seconds:g} is more than checkpoint.max_seconds "
            f"({checkpoint.max_seconds:g})"
        )
    return problems


def _explain(error: pydantic.ValidationError) -> ConfigError:
    problems = []
    for item in error.errors():
        *section, _ = place = [str(part) for part in item["loc"]]
        name = ".".join(place)
        if item["type"] == "extra_forbidden":
            table: Any = Config.model_fields[section[0]].annotation if section else Config
            return UnknownKeyError(name, list(table.model_fields), f"[{section[0]}]" if section else "")
        if item["type"] == "missing":
            problems.append(f"{name}: missing; the run cannot do without it")
        elif item["type"] == "model_type":
            problems.append(f"{name}: must be a table, written [{name}]")
        else:
            problems.append(f"{name}: {item['msg'].lower()}, not {item['input']!r}")
    return _as_error(problems)


def _as_error(problems: Sequence[str]) -> ConfigError:
    if len(problems) == 1:
        return ConfigError(problems[0])
    return ConfigError("\n".join(["the configuration has errors:", *(f"  {each}" for each in problems)]))

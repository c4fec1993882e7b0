"""What a run is going to be, worked out and checked before any process group is made. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from ckptman.errors import ConfigError
from ckptman.train.config import Config
from ckptman.train.dataset.tokenfile import TokenMeta, read_meta, sample_count
from ckptman.train.launch import Launch, mesh_shape
from ckptman.train.size import flops_per_token, parameter_count


@dataclass(frozen=True, slots=True)
class Setup:
    """A configuration that fits its data and its launcher, and what follows from the three."""

    config: Config
    launch: Launch
    tokens: TokenMeta
    vocab_size: int
    parameters: int
    flops_per_token: float

    @property
    def batch_tokens(self) -> int:
        """Target tokens of one optimizer step, over all ranks."""
        return self.config.data.global_batch * self.config.data.sequence_tokens


def prepare(config: Config, launch: Launch) -> Setup:
    """Look at the data and check it against the configuration. Called by every rank.

    Raises NotFoundError, CorruptError and FormatVersionError for the token folder, ConfigError for what does not fit.
    """
    tokens = read_meta(config.data.path)
    sample_count(config.data.path, tokens, config.data.sequence_tokens)
    vocab_size = config.model.vocab_size or tokens.vocab_size
    if vocab_size < tokens.vocab_size:
        raise ConfigError(
            f"model.vocab_size: {vocab_size} is less than the {tokens.vocab_size} of {config.data.path}; "
            f"leave it out to take theirs"
        )
    return Setup(
        config,
        launch,
        tokens,
        vocab_size,
        parameter_count(config.model, vocab_size),
        flops_per_token(config.model, vocab_size, config.data.sequence_tokens),
    )


def describe(setup: Setup) -> str:
    """The configuration as it was understood, and what it means, as text for people. For `--dry-run`."""
    config, launch = setup.config, setup.launch
    lines = []
    for section, values in config.model_dump(mode="json", exclude_none=True).items():
        lines += [f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in values.items()), ""]
    replicate, shard = mesh_shape(launch.world_size, [launch.local_world_size], config.parallel.shard_ranks)
    run_tokens = config.run.steps * setup.batch_tokens
    retention = config.checkpoint.retention()
    return "\n".join(
        [
            *lines,
            f"parameters   {setup.parameters:,} (vocabulary {setup.vocab_size:,})",
            f"mesh         {launch.world_size} ranks: replicate {replicate} x shard {shard}",
            f"data         {setup.tokens.count:,} tokens; a step takes {setup.batch_tokens:,}, the run {run_tokens:,} "
            f"({run_tokens / setup.tokens.count:.2f} epochs)",
            f"compute      {setup.flops_per_token:.3g} FLOPs per token, {setup.flops_per_token * run_tokens:.3g} a run",
            f"save         {config.checkpoint.save_policy()}",
            f"keep         {retention or 'all'}",
        ]
    )


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)

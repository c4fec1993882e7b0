"""A run before it starts: configuration, data and launcher checked against each other, model size, work per token."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from math import prod

from ckptman.errors import ConfigError
from ckptman.train.config import Config, ModelConfig
from ckptman.train.dataset.tokenfile import TokenMeta, read_meta, sample_count
from ckptman.train.launch import Launch, mesh_shape

PEAK_TFLOPS = (
    # NVIDIA, data sheets of GB200 and GB300 NVL72, HGX B200 and B300: half of what is said with sparsity.
    ("GB300", 2500.0),
    ("GB200", 2500.0),
    ("B300", 2250.0),
    ("B200", 2250.0),
    # Data sheets of GH200, H200, H100 and H800; the H20 has 148, as resellers quote its data sheet.
    ("GH200", 989.0),
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("H20", 148.0),
    # Data sheets of A100 (40 and 80 GB, SXM and PCIe alike) and A800. Leonardo's has 124 SMs where others have 108.
    ("A100-SXM-64GB", 358.0),
    ("A100", 312.0),
    ("A800", 312.0),
    # Data sheets of L40S, L40 and A40.
    ("L40S", 362.0),
    ("L40", 181.0),
    ("A40", 149.7),
    # AMD, data sheets of the Instinct series. An MI250 or MI250X is two devices (GCDs), with half of its peak each.
    ("MI355X", 2516.6),
    ("MI350X", 2306.9),
    ("MI325X", 1307.4),
    ("MI300X", 1307.4),
    ("MI300A", 980.6),
    ("MI250X", 191.5),
    ("MI250", 181.0),
    ("MI210", 181.0),
)
"""Dense BF16 peak of one device as torch sees it, in TFLOP/s, by words of its name. The first match counts."""


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
    """Check the data against the configuration. Every rank calls it.

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
    """Return the configuration as understood, and what follows from it, as text. For `--dry-run`."""
    config, launch = setup.config, setup.launch
    lines = []
    for section, values in config.model_dump(mode="json", exclude_none=True).items():
        lines += [
            f"[{section}]",
            *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()),
            "",
        ]
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


def parameter_shapes(model: ModelConfig, vocab_size: int) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of each parameter of the decoder, as `Decoder.named_parameters` has them, without building it."""
    heads, kv_heads = model.heads * model.head_dim, model.kv_heads * model.head_dim
    block = (
        ("attention_norm.weight", (model.dim,)),
        ("attention.query.weight", (heads, model.dim)),
        ("attention.key.weight", (kv_heads, model.dim)),
        ("attention.value.weight", (kv_heads, model.dim)),
        ("attention.out.weight", (model.dim, heads)),
        ("feed_forward_norm.weight", (model.dim,)),
        ("feed_forward.gate.weight", (model.hidden_dim, model.dim)),
        ("feed_forward.up.weight", (model.hidden_dim, model.dim)),
        ("feed_forward.down.weight", (model.dim, model.hidden_dim)),
    )
    found: list[tuple[str, tuple[int, ...]]] = [("embedding.weight", (vocab_size, model.dim))]
    found += [(f"blocks.{number}.{name}", shape) for number in range(model.layers) for name, shape in block]
    found.append(("norm.weight", (model.dim,)))
    return found if model.tied else [*found, ("head.weight", (vocab_size, model.dim))]


def parameter_count(model: ModelConfig, vocab_size: int) -> int:
    """Number of parameters of the decoder; a tied head is counted once."""
    return sum(prod(shape) for _, shape in parameter_shapes(model, vocab_size))


def flops_per_token(model: ModelConfig, vocab_size: int, sequence_tokens: int) -> float:
    """FLOPs of forward and backward for one token: 6 N + 12 layers dim sequence (Chowdhery et al., PaLM, appendix B).

    N leaves out the embedding, which is a look-up, and keeps the head, which is a product; recomputation in
    activation checkpointing is not counted, as is the custom for MFU.
    """
    embedding = 0 if model.tied else vocab_size * model.dim
    matrices = parameter_count(model, vocab_size) - embedding
    return 6.0 * matrices + 12.0 * model.layers * model.dim * sequence_tokens


def peak_tflops(device_name: str) -> float | None:
    """Dense BF16 peak of one device, in TFLOP/s; None for a device that is not in the table."""
    return next((peak for words, peak in PEAK_TFLOPS if re.search(rf"\b{words}\b", device_name, re.IGNORECASE)), None)

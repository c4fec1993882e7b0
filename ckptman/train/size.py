"""How large a model is and how much work a token is: plain arithmetic, no torch."""

from __future__ import annotations

from ckptman.train.config import ModelConfig

# Dense BF16 peak of one device as torch sees it, in TFLOP/s, by a part of its name; from the makers' data sheets.
# The first match counts. One MI250X is two devices (GCDs).
PEAK_TFLOPS = (
    ("B200", 2250.0),
    ("GH200", 989.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
    ("A40", 149.7),
    ("V100", 125.0),
    ("MI355X", 2500.0),
    ("MI325X", 1307.0),
    ("MI300X", 1307.0),
    ("MI300A", 980.6),
    ("MI250X", 191.5),
    ("MI210", 181.0),
)


def parameter_count(model: ModelConfig, vocab_size: int) -> int:
    """Number of parameters of the decoder; a tied head is counted once."""
    attention = model.dim * model.head_dim * (2 * model.heads + 2 * model.kv_heads)
    block = attention + 3 * model.dim * model.hidden_dim + 2 * model.dim
    return vocab_size * model.dim * (1 if model.tied else 2) + model.layers * block + model.dim


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
    return next((peak for part, peak in PEAK_TFLOPS if part.lower() in device_name.lower()), None)


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

"""What training takes of the memory of one GPU, under hybrid sharding (HSDP): full shards in a group of ranks, replicas
over the groups.

Parameters, gradients and moments are cut by the ranks of a shard group; a layer is gathered while it is at work. Of the
activations of a Llama-style decoder is counted what the backward pass needs: with an attention that keeps no matrix of
scores (flash), per token and layer the inputs of both norms, of both groups of products, queries, keys, values and the
output of the attention, and four times the width of the feed-forward.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptman.forecast.figures import Figure
from ckptman.policies.parameters import check_count, check_positive
from ckptman.policies.retention_rules import size_text

_HEAD_WIDTH = 128
_LLAMA = "shapes of Llama 2 and 3: 12 x layers x dim^2 parameters"
_FLOAT_BYTES = 4
ALLOCATOR_SHARE = 0.1
"""What the CUDA context, NCCL, kernels' workspaces and gaps between allocations take besides, of everything."""


@dataclass(frozen=True)
class Shape:
    """What activations depend on. `hidden`: the width of the feed-forward; `kv_share`: key-value heads per head.

    `source`: how it was guessed, where it was. `tied`: the head is the embedding.
    """

    dim: int
    layers: int
    vocab: int
    hidden: int
    kv_share: float = 1.0
    source: str = ""
    tied: bool = False

    @property
    def assumed(self) -> bool:
        """Derived, at least in part, from the number of parameters."""
        return bool(self.source)


@dataclass(frozen=True)
class Batch:
    """What one GPU computes at once: `tokens` in all its samples, with elements of `item_bytes`."""

    tokens: int
    item_bytes: int = 2


@dataclass(frozen=True)
class Weights:
    """What is trained, and in which types: bytes of a parameter, and of all its moments together.

    `shards`: ranks that have one copy together. `accumulates`: gradients of several micro-batches are added up before
    they are reduced; then each GPU has all of them. `frozen` parameters, of `frozen_bytes` in all, come on top: without
    gradients or moments.
    """

    parameters: int
    item_bytes: int
    moment_bytes: int
    shards: int
    accumulates: bool = False
    frozen: int = 0
    frozen_bytes: int = 0


def likely_shape(parameters: float, vocab: int, dim: int | None = None, layers: int | None = None) -> Shape:
    """Return the shape of a decoder with so many parameters, as far as it is not given. Raises IntervalError."""
    check_positive("plan", "parameters", parameters)
    for name, value in (("vocab", vocab), ("dim", dim), ("layers", layers)):
        if value is not None:
            check_count("plan", name, value)
    source = _source(dim, layers)
    if layers is None:
        squares = dim**2 if dim is not None else None
        each = (parameters / (12 * _HEAD_WIDTH**2)) ** (1 / 3) if squares is None else parameters / (12 * squares)
        layers = max(1, round(each))
    if dim is None:
        exact = (parameters / (12 * layers)) ** 0.5
        dim = max(_HEAD_WIDTH, round(exact / _HEAD_WIDTH) * _HEAD_WIDTH)
    return Shape(dim, layers, vocab, hidden=-(-dim * 8 // 3), source=source)


def _source(dim: int | None, layers: int | None) -> str:
    if dim is None and layers is None:
        return f"{_LLAMA} with dim = 128 x layers; hidden = 8/3 x dim"
    if dim is not None and layers is not None:
        return "dim and layers as given; hidden = 8/3 x dim, as in Llama"
    given, other = ("layers", "dim") if dim is None else ("dim", "layers")
    return f"{given} as given, {other} from 12 x layers x dim^2 parameters; hidden = 8/3 x dim, as in Llama"


def memory_figures(weights: Weights, shape: Shape, batch: Batch) -> list[Figure]:
    """Return the bytes of one GPU by what they are for, and two totals: without and with activation checkpointing."""
    check_count("plan", "tokens", batch.tokens)
    count, cut = weights.parameters, weights.shards
    shared = "" if cut == 1 else f" / {cut} ranks of a shard group"
    trained = -(-count * weights.item_bytes // cut)
    parameters = -(-(count * weights.item_bytes + weights.frozen_bytes) // cut)
    held = f"{count:,} x {weights.item_bytes} B"
    if weights.frozen:
        held = f"({held} + {size_text(weights.frozen_bytes)} of {weights.frozen:,} that are frozen)"
    gradient_bytes = count * _FLOAT_BYTES if weights.accumulates else trained
    gradients = Figure(
        "gradients",
        gradient_bytes,
        "bytes",
        f"{count:,} x 4 B (float32, whole on each GPU while micro-batches are accumulated)"
        if weights.accumulates
        else f"{count:,} x {weights.item_bytes} B{shared}",
        "FSDP2: gradients that are not reduced yet are not sharded" if weights.accumulates else "",
    )
    found = [
        Figure("parameters", parameters, "bytes", f"{held}{shared}"),
        gradients,
        Figure(
            "optimizer",
            -(-count * weights.moment_bytes // cut),
            "bytes",
            f"{count:,} x {weights.moment_bytes} B{shared}",
        ),
        _gathered(weights, shape, batch),
    ]
    activations = activation_figures(shape, batch)
    fixed = sum(each.value for each in found)
    names = ("parameters", "gradients", "optimizer", "gathered")
    totals = [
        Figure(
            f"total_{how}",
            round((fixed + each.value) * (1 + ALLOCATOR_SHARE)),
            "bytes",
            f"({' + '.join(names)} + {each.name}) x {1 + ALLOCATOR_SHARE:g}",
            f"{ALLOCATOR_SHARE * 100:g} % for the context, NCCL, workspaces and gaps",
        )
        for how, each in zip(("plain", "checkpointed"), activations)
    ]
    return [*found, *activations, *totals]


def activation_figures(shape: Shape, batch: Batch) -> list[Figure]:
    """Activations at their peak: kept, and computed again layer by layer (activation checkpointing)."""
    tokens, item = batch.tokens, batch.item_bytes
    # Elements that the backward pass of a layer needs, per token.
    width = (6 + 2 * shape.kv_share) * shape.dim + 4 * shape.hidden
    layer, inputs = round(tokens * item * width), tokens * item * shape.dim
    logits = tokens * shape.vocab * (item + 2 * _FLOAT_BYTES)
    at_loss = f"{tokens:,} tokens x {shape.vocab:,} x ({item} + 4 + 4) B at the loss"
    each = f"({6 + 2 * shape.kv_share:.3g} x {shape.dim:,} + 4 x {shape.hidden:,})"
    kept = f"{shape.layers} layers x {tokens:,} tokens x {each} x {item} B"
    again = (
        f"{shape.layers} layers x {tokens:,} tokens x {shape.dim:,} x {item} B + the larger of one layer "
        f"({size_text(layer)}) and the loss ({size_text(logits)})"
    )
    return [
        Figure("activations", shape.layers * layer + logits, "bytes", f"{kept} + {at_loss}", shape.source),
        Figure("activations_checkpointed", shape.layers * inputs + max(layer, logits), "bytes", again, shape.source),
    ]


def _gathered(weights: Weights, shape: Shape, batch: Batch) -> Figure:
    """Two layers are gathered at a time; embedding, head and last norm all the time, and their gradients wait for the
    end of the backward pass. Those of a layer are reduced while the next one is at work."""
    everything = weights.parameters + weights.frozen
    root = min(everything, root_parameters(shape))
    layer = max(0, everything - root) // shape.layers
    item = batch.item_bytes
    waiting, reduced = min(root, weights.parameters), min(layer, weights.parameters)
    ends = "embedding" if shape.tied else "embedding and head"
    formula = (
        f"2 layers x {layer:,} x {item} B + {root:,} x {item} B ({ends}) "
        f"+ {waiting:,} x {item} B (their gradients) + {reduced:,} x ({item} + 4) B (gradients being reduced)"
    )
    return Figure(
        "gathered",
        2 * layer * item + (root + waiting) * item + reduced * (item + _FLOAT_BYTES),
        "bytes",
        formula,
        "FSDP2 gathers the next layer while one is at work, and keeps what is in no layer",
    )


def root_parameters(shape: Shape) -> int:
    """Parameters that are in no layer: the embedding, the head unless it is the same, and the last norm."""
    return (1 if shape.tied else 2) * shape.vocab * shape.dim + shape.dim

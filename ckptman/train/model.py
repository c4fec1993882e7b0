"""A Llama-style decoder: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU. No biases.

Shapes: B samples, T tokens, D = dim, H heads and K key-value heads of width W, V vocabulary.
"""

from __future__ import annotations

import math
import zlib

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ckptman.engine.state.local_shards import local_parts
from ckptman.train.config import ModelConfig

_INIT_ROWS = 256
"""Rows that share one random stream: a rank draws only the streams that touch its shard."""


class Attention(nn.Module):
    """Causal grouped-query attention (Ainslie et al., 2023)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.query = nn.Linear(config.dim, config.heads * config.head_dim, bias=False)
        self.key = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.value = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.out = nn.Linear(config.heads * config.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """x [B, T, D], rotation [2, T, W/2] -> [B, T, D]"""
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, heads, T, W]
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(
            rotate(query, rotation), rotate(key, rotation), value, is_causal=True, enable_gqa=True
        )
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, 2020): down(silu(gate x) * up x)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.up = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.down = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """One layer. With `recompute` its activations are not kept but computed again in the backward pass."""

    def __init__(self, config: ModelConfig, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.dropout = config.dropout
        self.attention_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        if self.recompute and self.training:
            # Inside the block rather than around it, so that parameter names stay as they are and FSDP gathers once.
            out: Tensor = checkpoint(self._layer, x, rotation, use_reentrant=False, preserve_rng_state=self.dropout > 0)
            return out
        return self._layer(x, rotation)

    def _layer(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.attention_norm(x), rotation), self.dropout, self.training)
        return x + F.dropout(self.feed_forward(self.feed_forward_norm(x)), self.dropout, self.training)


class Decoder(nn.Module):
    """Token ids [B, T] to logits [B, T, V]. With `tied` the head is the embedding, and there is no head parameter."""

    def __init__(self, config: ModelConfig, vocab_size: int, recompute: bool = False) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config, recompute) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.head = None if config.tied else nn.Linear(config.dim, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        rotation = rotation_table(tokens.shape[1], self.config.head_dim, self.config.rope_theta, tokens.device)
        x = F.dropout(self.embedding(tokens), self.config.dropout, self.training)
        for block in self.blocks:
            x = block(x, rotation)
        return F.linear(self.norm(x), self.embedding.weight if self.head is None else self.head.weight)


def rotation_table(tokens: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Cosines and sines of the rotary embedding, float32 [2, T, W/2] (Su et al., 2021)."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.arange(tokens, device=device, dtype=torch.float32)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate the pairs (i, i + W/2) of x [B, heads, T, W]; in float32, because angles are large at the end."""
    cosine, sine = rotation
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x.dtype)


def token_loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy summed over all tokens, in float32. logits [B, T, V], targets [B, T] -> []"""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


@torch.no_grad()
def init_weights(model: Decoder, seed: int) -> None:
    """Fill all parameters: normal with deviation 0.02, by 1/sqrt(2 layers) smaller where a layer writes back (GPT-2).

    Every value depends on (seed, name, place in the parameter) only, so a sharded model starts with exactly the values
    of an unsharded one, on any number of ranks, and each rank draws little more than its own shard.
    """
    for name, parameter in model.named_parameters():
        narrow = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
        deviation = 0.02 / math.sqrt(2 * model.config.layers) if narrow else 0.02
        for box, local in local_parts(parameter):
            if parameter.dim() == 1:
                local.fill_(1.0)  # norms
            else:
                local.copy_(_normal_rows(name, seed, box.offsets[0], local.shape) * deviation)


def _normal_rows(name: str, seed: int, first_row: int, shape: torch.Size) -> Tensor:
    """Rows [first_row, first_row + shape[0]) of the standard normal matrix that belongs to (name, seed), on the CPU."""
    end_row, columns = first_row + shape[0], shape[1]
    rows = np.empty((shape[0], columns), np.float32)
    for start in range(first_row - first_row % _INIT_ROWS, end_row, _INIT_ROWS):
        stream = np.random.default_rng((seed, zlib.crc32(name.encode()), start))
        block = stream.standard_normal((_INIT_ROWS, columns), np.float32)
        first, end = max(first_row, start), min(end_row, start + _INIT_ROWS)
        rows[first - first_row : end - first_row] = block[first - start : end - start]
    return torch.from_numpy(rows)

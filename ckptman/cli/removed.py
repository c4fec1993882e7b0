"""Options that earlier versions had, and what replaces each."""

from __future__ import annotations

_GPU_MEMORY = "ckptman plan no longer estimates GPU memory; use `accelerate estimate-memory`"

REMOVED: dict[tuple[str, str], str] = {
    ("plan", "--config"): "use --params with the number that `python -m ckptman.train --dry-run` prints",
    ("plan", "--set"): "it changed a key of --config; use --params",
    ("plan", "--shard"): "leave it out; the ranks share each save evenly, however the model is sharded",
    ("plan", "--gpu-memory"): _GPU_MEMORY,
    ("plan", "--sequence"): _GPU_MEMORY,
    ("plan", "--micro-batch"): _GPU_MEMORY,
    ("plan", "--vocab"): _GPU_MEMORY,
    ("plan", "--dim"): _GPU_MEMORY,
    ("plan", "--layers"): _GPU_MEMORY,
    ("simulate", "--svg"): "use --json, whose `curve` any plotting program can draw",
    ("probe loader", "--config"): "name a function that makes the loader, such as train.py:make_loader",
    ("probe loader", "--set"): "name a function that makes the loader, such as train.py:make_loader",
    ("probe loader", "--world-size"): "let the function make the loader of one rank",
}
"""(verb, option) -> the rest of the sentence "OPTION was removed: ..."."""

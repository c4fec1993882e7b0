"""What the campaign saves: a small state of every kind whose version can be told from any of its bytes."""

import math

import torch

import ckptman

POISON = 0xA5
"""What tensors are filled with before a load: a value that reaches them is seen."""
_MARK = "not loaded"
SPOILT = 1000
"""From this version on a tensor is NaN."""


def content(version, scale=1):
    """A state: tensors of several dtypes, one over a page and one of no elements, and plain values of all kinds.

    At `scale` 16 the largest tensor has 1 MiB, and a place of its own on pages.
    """
    rows = torch.arange(16 * scale, dtype=torch.int64).reshape(-1, 1) * 31 + torch.arange(1024)
    return {
        "x": {
            "large": (rows * (version + 1) + version).to(torch.int32),
            "half": ((rows[:16, :33] + version) % 251).to(torch.bfloat16).t().contiguous(),
            "flags": (rows[:7, :5] + version) % 3 == 0,
            "one": torch.tensor(math.nan if version >= SPOILT else version + 0.5, dtype=torch.float64),
            "none": torch.zeros(0, 3),
        },
        "epoch": version,
        "text": f"version {version} \u00e4\u03c9",
        "plain": {"lr": [0.1 * version, float("inf")], "raw": bytes([version % 256]) * 40, "pair": (version, None)},
    }


def blank(scale=1):
    """A state of the same shapes in which every byte and value is poison."""
    state = content(0, scale)
    for tensor in state["x"].values():
        bytes_of(tensor).fill_(1 if tensor.dtype == torch.bool else POISON)
    return {
        **state,
        "epoch": -1,
        "text": _MARK,
        "plain": {"lr": [_MARK, _MARK], "raw": _MARK, "pair": _MARK},
    }


def bytes_of(tensor):
    """The elements as bytes: a view."""
    return tensor.reshape(-1).view(torch.uint8)


def same(found, wanted):
    """Whether two states are equal bit for bit, types of plain values included."""
    tensors = all(
        name in found["x"] and torch.equal(bytes_of(found["x"][name]), bytes_of(tensor))
        for name, tensor in wanted["x"].items()
    )
    values = [(state["epoch"], state["text"], state["plain"]) for state in (found, wanted)]
    return tensors and repr(values[0]) == repr(values[1])


def untouched(state, scale=1):
    """Whether a poisoned state is as it was made."""
    return same(state, blank(scale))


def version_of(state, scale=1):
    """The version that a state is, bit for bit; None: it is a mixture, or damaged."""
    version = state["epoch"]
    return version if type(version) is int and version >= 0 and same(state, content(version, scale)) else None


def open_run(root, state, **options):
    """A run that saves only when asked to, and waits 20 s for other ranks at most."""
    options = {"save_policy": ckptman.EverySteps(10**6), "timeout_seconds": 20.0, **options}
    return ckptman.Checkpointer(root, state, deadline=None, **options)


def save_versions(root, versions, scale=1, **options):
    """Save versions by step, one after the other, in one run; nothing is saved at its end besides."""
    state = content(0, scale)
    with open_run(root, state, async_save=False, **options) as run:
        run.restore()
        for step, version in versions.items():
            state.update(content(version, scale))
            run.save(step)

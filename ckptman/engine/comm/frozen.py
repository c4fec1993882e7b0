"""What identifies the frozen parameters of a Trainable, of which each rank may hold shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckptman.engine.comm.control_group import AllRanks, Channel, Contribution, failing_as_one
from ckptman.engine.state.trainable import FrozenPart, Trainable


def agree_on_frozen(channel: Channel, state: Mapping[str, Any]) -> None:
    """Let each Trainable of a state know what identifies its frozen parameters, if they were changed on some rank.

    Every rank calls it, before it asks the objects for what is to be saved or loaded.

    Raises on every rank alike: ConfigError, where a frozen parameter differs between ranks that have it as a whole.
    """
    trainables = {name: each for name, each in state.items() if isinstance(each, Trainable)}
    if not trainables:
        return
    optimizers = [each for each in state.values() if isinstance(each, torch.optim.Optimizer)]
    for trainable in trainables.values():
        trainable.note_trained(optimizers)

    def changed() -> Contribution:
        return Contribution(maxima=(any(each.frozen_changed() for each in trainables.values()),))

    with failing_as_one():
        if not any(channel.agree("what is frozen", changed).maxima):
            return
    with failing_as_one(), AllRanks[dict[str, dict[FrozenPart, int]]](channel) as digests:
        digests.mine = {name: each.digest_frozen() for name, each in trainables.items()}
    for name, each in trainables.items():
        each.agree(of_rank.get(name, {}) for of_rank in digests.all)

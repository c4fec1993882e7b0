"""Whether the metrics that `KeepBest` goes by are given where it saves, and not at other steps alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptman.errors import warn_only
from ckptman.policies.retention import KeepBest, RetentionPolicy
from ckptman.policies.retention_rules import rules_of


class BestMetrics:
    """Warns once of each metric that was given at a step that was not saved, and not at the next one that is."""

    def __init__(self, policy: RetentionPolicy | None) -> None:
        self._given: dict[str, int] = {rule.metric: 0 for rule in rules_of(policy) if isinstance(rule, KeepBest)}
        """The step at which each was given last, 0 for none; those that were saved once are no more among them."""

    def note(self, step: int, metrics: Mapping[str, Any] | None, *, is_saved: bool) -> None:
        """Note what a step was given. The leader calls it."""
        for name, given in list(self._given.items()):
            if metrics and name in metrics:
                self._given[name] = step
                if is_saved:
                    del self._given[name]
            elif is_saved and given:
                del self._given[name]
                warn_only(
                    f"KeepBest({name!r}) goes by what is given at a save: {name} was given at step {given}, which was "
                    f"not saved, and not at step {step}, which is. Call save(step, metrics) where it is measured"
                )

"""Retention policies as data: what a run stores beside its checkpoints, so that `ckptman prune` can go by it later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptman.errors import ConfigError
from ckptman.policies.retention_by_time import KeepDaily, KeepHourly, KeepMonthly, KeepWeekly, KeepWithin
from ckptman.policies.retention_rules import (
    AtMost,
    KeepAll,
    KeepAny,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepSteps,
    RetentionPolicy,
    limits_of,
    rules_of,
)

OWN = "own"
"""Marks a rule whose class is the user's: it is named, and cannot be made again."""
_RULES: dict[str, type[RetentionPolicy]] = {
    rule.__name__: rule
    for rule in (KeepLast, KeepEvery, KeepBest, KeepSteps, KeepWithin, KeepHourly, KeepDaily, KeepWeekly, KeepMonthly)
}


def to_data(policy: RetentionPolicy | None) -> dict[str, Any]:
    """Return a policy in lists, texts and numbers: `{"rules": [{"rule": "KeepLast", "count": 3}], "limits": []}`.

    None, which keeps everything, has `"rules": None`.
    """
    rules = [_rule_data(rule) for rule in rules_of(policy) if not isinstance(rule, KeepAll)]
    limits = [{"bytes": each.bytes} if each.bytes else {"percent": each.percent} for each in limits_of(policy)]
    return {"rules": rules if policy is not None else None, "limits": limits}


def from_data(data: Mapping[str, Any]) -> RetentionPolicy | None:
    """Return the policy that `to_data` was given. Raises: ConfigError (a rule of the user's own, or no such data)."""
    if data.get("rules") is None and "rules" in data:
        return None
    try:
        rules = [_rule(each) for each in data["rules"]]
        limits = [AtMost(**each) for each in data["limits"]]
        policy: RetentionPolicy | None = KeepAny(tuple(rules)) if len(rules) > 1 else (rules[0] if rules else None)
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"not a stored retention policy ({type(error).__name__}: {error})") from error
    for each in limits:
        policy = policy & each if policy is not None else each
    if policy is None:
        raise ConfigError("not a stored retention policy: it has neither rules nor limits")
    return policy


def _rule_data(rule: RetentionPolicy) -> dict[str, Any]:
    kind = type(rule)
    if _RULES.get(kind.__name__) is not kind:
        return {"rule": OWN, "name": f"{kind.__module__}.{kind.__qualname__}"}
    return {"rule": kind.__name__, **vars(rule)}


def _rule(data: Mapping[str, Any]) -> RetentionPolicy:
    if not isinstance(data, Mapping):
        raise TypeError(f"{data!r} is not a rule")
    fields = dict(data)
    name = fields.pop("rule")
    if name == OWN:
        raise ConfigError(
            f"the run keeps checkpoints by a rule of its own, {fields.get('name')}, which only its program can apply"
        )
    if name not in _RULES:
        raise ConfigError(f"there is no rule {name!r}: a newer ckptman wrote it (pip install -U ckptman)")
    return KeepSteps(*fields["steps"]) if name == KeepSteps.__name__ else _RULES[name](**fields)

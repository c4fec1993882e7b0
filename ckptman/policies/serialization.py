"""Retention policies as data: what a run stores beside its checkpoints, so that `ckptman prune` can go by it later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckptman.errors import ConfigError
from ckptman.policies.calendar import KeepDaily, KeepHourly, KeepMonthly, KeepWeekly, KeepWithin
from ckptman.policies.limit import AtMost, KeepAll, limited, rules_of
from ckptman.policies.rules import KeepAny, KeepBest, KeepEvery, KeepLast, KeepSteps, RetentionPolicy

OWN = "own"
"""Marks a rule whose class is the user's: it is named, and cannot be made again."""
_RULES: dict[str, Callable[..., RetentionPolicy]] = {
    rule.__name__: rule
    for rule in (KeepLast, KeepEvery, KeepBest, KeepWithin, KeepHourly, KeepDaily, KeepWeekly, KeepMonthly)
}
_FIELDS = ("count", "steps", "metric", "mode", "seconds")


def to_data(policy: RetentionPolicy | None) -> dict[str, Any]:
    """A policy in lists, texts and numbers: `{"rules": [{"rule": "KeepLast", "count": 3}], "limits": []}`.

    None, which keeps everything, has `"rules": None`.
    """
    limit = limited(policy)
    rules = [_rule_data(rule) for rule in rules_of(policy) if not isinstance(rule, KeepAll)]
    limits = [
        {"bytes": each.bytes} if each.bytes else {"percent": each.percent} for each in (limit.limits if limit else ())
    ]
    return {"rules": rules if policy is not None else None, "limits": limits}


def from_data(data: Mapping[str, Any]) -> RetentionPolicy | None:
    """The policy that `to_data` was given. Raises: ConfigError (a rule of the user's own, or no such data)."""
    if data.get("rules") is None and "rules" in data:
        return None
    try:
        rules = [_rule(each) for each in data["rules"]]
        limits = [AtMost(**each) for each in data["limits"]]
        policy: RetentionPolicy | None = KeepAny(tuple(rules)) if len(rules) > 1 else (rules[0] if rules else None)
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"this is no stored retention policy ({type(error).__name__}: {error})") from error
    for each in limits:
        policy = policy & each if policy is not None else each
    if policy is None:
        raise ConfigError("this is no stored retention policy: it has neither rules nor limits")
    return policy


def _rule_data(rule: RetentionPolicy) -> dict[str, Any]:
    name = type(rule).__name__
    if isinstance(rule, KeepSteps) and type(rule) is KeepSteps:
        return {"rule": name, "steps": list(rule.steps)}
    if _RULES.get(name) is not type(rule):
        return {"rule": OWN, "name": f"{type(rule).__module__}.{type(rule).__qualname__}"}
    return {"rule": name, **{field: getattr(rule, field) for field in _FIELDS if hasattr(rule, field)}}


def _rule(data: Mapping[str, Any]) -> RetentionPolicy:
    if not isinstance(data, Mapping):
        raise TypeError(f"{data!r} is no rule")
    fields = dict(data)
    name = fields.pop("rule")
    if name == OWN:
        raise ConfigError(
            f"the run keeps checkpoints by a rule of its own, {fields.get('name')}, which only its program can apply"
        )
    if name == KeepSteps.__name__:
        return KeepSteps(*fields["steps"])
    if name not in _RULES:
        raise ConfigError(f"there is no rule {name!r}: a newer ckptman wrote it (pip install -U ckptman)")
    return _RULES[name](**fields)

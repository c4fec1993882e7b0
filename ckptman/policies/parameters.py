"""Checks of a policy's parameters, made when the policy is built. Every message names the parameter and the value.

A value of the wrong kind is a ConfigError, a number that cannot be (negative, zero, NaN, infinite) an IntervalError.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import TypeGuard

from ckptman.errors import ConfigError, IntervalError


def check_count(where: str, name: str, value: object, hint: str = "") -> None:
    """Refuse `value` unless it is a whole number of at least 1."""
    if not (isinstance(value, Integral) and _is_number(value) and value >= 1):
        raise _refusal(where, name, value, "a whole number of at least 1", hint)


def check_positive(where: str, name: str, value: object) -> None:
    """Refuse `value` unless it is a finite number above 0."""
    if not (_is_number(value) and 0 < value < math.inf):
        raise _refusal(where, name, value, "a finite number above 0")


def check_at_least(where: str, name: str, value: object, least: float) -> None:
    """Refuse `value` unless it is a finite number of at least `least`."""
    if not (_is_number(value) and least <= value < math.inf):
        raise _refusal(where, name, value, f"a finite number of at least {least:g}")


def check_range(where: str, min_seconds: float, max_seconds: float | None) -> None:
    """Refuse bounds that are no seconds, or that cross. `max_seconds=None` is no upper bound."""
    check_at_least(where, "min_seconds", min_seconds, 0)
    if max_seconds is None:
        return
    check_positive(where, "max_seconds", max_seconds)
    if min_seconds > max_seconds:
        raise IntervalError(f"{where}: min_seconds ({min_seconds!r}) must not be above max_seconds ({max_seconds!r})")


def _is_number(value: object) -> TypeGuard[float]:
    # To Python a bool is an int, but EverySteps(True) is a slip of the pen.
    return isinstance(value, Real) and not isinstance(value, bool)


def _refusal(where: str, name: str, value: object, rule: str, hint: str = "") -> ConfigError:
    kind = IntervalError if _is_number(value) else ConfigError
    return kind(f"{where}: {name} must be {rule}, not {value!r}" + (f" ({hint})" if hint else ""))

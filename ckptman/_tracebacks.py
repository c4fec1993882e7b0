"""Tracebacks that end at the user's line."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

from ckptman.errors import CkptmanError

P = ParamSpec("P")
R = TypeVar("R")
TRACEBACK_ENV = "CKPTMAN_TRACEBACK"
"""Set to 1 to see where in ckptman an error was raised, for a bug report."""


def short_traceback(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate what users call: the traceback of a CkptmanError ends at their line."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        handled = sys.exc_info()[1]
        try:
            return function(*args, **kwargs)
        except CkptmanError as error:
            # What the caller was handling, such as an error in whose `finally` it calls this, is to be seen.
            if os.environ.get(TRACEBACK_ENV) or (handled is not None and handled is not error):
                raise
            raise error.with_traceback(None) from _shown_reason(error)  # CKPTMAN_TRACEBACK=1 shows where in ckptman

    return call


def _shown_reason(error: CkptmanError) -> BaseException | None:
    """Note what an error was raised from, and return it if the error does not say it all."""
    error.raised_from = raised_from(error)
    cause = error.raised_from[0]
    if cause is None or not (error.of_program or type(error) is CkptmanError):
        return None
    cause.__traceback__ = _outside(cause.__traceback__)
    return cause


def raised_from(error: BaseException) -> tuple[BaseException | None, BaseException | None]:
    """Return the cause of an error, and what it was raised while handling, whether a traceback shows them or not."""
    noted = error.raised_from if isinstance(error, CkptmanError) else None
    return noted or (error.__cause__, None if error.__suppress_context__ else error.__context__)


def _outside(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from its first frame outside of ckptman on."""
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] == "ckptman":
        trace = trace.tb_next
    return trace

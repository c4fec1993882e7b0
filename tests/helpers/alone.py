"""A process of its own for a test, forked from the server of `ranks`, which has torch: it may fork ranks itself."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.helpers.ranks import _CONTEXT, RankError


def alone(function: Callable[..., Any], *args: Any, limit_seconds: float = 100.0) -> Any:
    """What `function(*args)` returns there. Raises: RankError with its traceback, or that it did not end in time."""
    ours, theirs = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_main, args=(theirs, function, args))
    process.start()
    theirs.close()
    try:
        if not ours.poll(limit_seconds):
            raise RankError(f"{function.__name__} did not end in {limit_seconds:g} s")
        failed, answer = ours.recv()
    finally:
        process.kill()
        process.join(10)
        ours.close()
    if failed:
        raise RankError(answer)
    return answer


def _main(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        answer = False, function(*args)
    except BaseException:
        answer = True, traceback.format_exc()
    pipe.send(answer)
    pipe.close()

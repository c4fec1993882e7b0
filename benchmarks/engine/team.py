"""Processes to measure in: fresh ones that import everything anew, and forked ones that share the state.

Each contestant works in a process of its own, so that nobody's allocator, threads or caches help or hinder another;
all of them see the same tensors, and take turns.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

LIMIT_SECONDS = 900.0


class MeasureError(Exception):
    """A process could not do what was asked."""


def fresh(function: Callable[..., Any], *arguments: Any, limit_seconds: float = LIMIT_SECONDS) -> Any:
    """The result of a function in a new interpreter. Raises: MeasureError."""
    return _one("spawn", function, arguments, limit_seconds)


def forked(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function in a fork of this process."""
    return _one("fork", function, arguments, LIMIT_SECONDS)


def _one(method: str, function: Callable[..., Any], arguments: tuple[Any, ...], limit_seconds: float) -> Any:
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_once, args=(theirs, function, arguments))  # type: ignore[attr-defined]
    process.start()
    theirs.close()
    try:
        return _receive(ours, limit_seconds)
    finally:
        process.join(10)
        if process.is_alive():
            process.kill()


def ranks(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The results of function(rank, *arguments) on forked ranks joined by gloo."""
    with tempfile.TemporaryDirectory() as folder:
        members = [Member(_rank, rank, world, folder, function, arguments) for rank in range(world)]
        try:
            for each in members:
                each.begin()
            return [each.end() for each in members]
        finally:
            for each in members:
                each.close()


def _rank(number: int, world: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    import torch.distributed as dist

    os.environ.update(RANK=str(number), WORLD_SIZE=str(world), LOCAL_RANK=str(number))
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=number, world_size=world)
    try:
        return function(number, *arguments)
    finally:
        dist.barrier()
        dist.destroy_process_group()


class Member:
    """A forked process that calls one function whenever it is told to."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._pipe, function, arguments))
        self._process.start()
        theirs.close()

    def __enter__(self) -> Member:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def begin(self, *more: Any) -> None:
        self._pipe.send(more)

    def end(self) -> Any:
        return _receive(self._pipe)

    def call(self, *more: Any) -> Any:
        """Call the function with its own arguments and these. Raises: MeasureError."""
        self.begin(*more)
        return self.end()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()


def _receive(pipe: Connection, limit_seconds: float = LIMIT_SECONDS) -> Any:
    try:
        if not pipe.poll(limit_seconds):
            raise MeasureError(f"no answer within {limit_seconds:.0f} s")
        good, value = pipe.recv()
    except EOFError:
        raise MeasureError("the process has died") from None
    if not good:
        raise MeasureError(value)
    return value


def _answer(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    warnings.simplefilter("ignore")
    try:
        return True, function(*arguments)
    except BaseException:  # noqa: BLE001, torch's CheckpointException is no Exception
        return False, traceback.format_exc()


def _serve_once(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    pipe.send(_answer(function, arguments))


def _serve(pipe: Connection, parents: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    parents.close()
    try:
        while (more := pipe.recv()) is not None:
            pipe.send(_answer(function, (*arguments, *more)))
    except (EOFError, OSError):
        return

"""How the ranks of a run communicate: two process groups of their own, so that nothing of ours meets a training step.

One is for the decisions of the training thread, one for saves in the background. Both are gloo, on the CPU: nothing
here touches a device, and a collective of a save can never interleave with one of the training step.
"""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from xxhash import xxh3_128_intdigest

from ckptman._torch_compat import default_store
from ckptman.errors import CkptmanError, ConfigError, RankLostError, plain_lines, warn
from ckptman.runtime.outcome import this_node

LATE_SECONDS = 30.0
"""After so long, ranks that are waited for are named."""
_NAMED = 8
_meetings: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Failure:
    """What went wrong on a rank, in a form that crosses ranks. `error` only if it is one of ours (they all pickle);
    `errno` if the system said no."""

    rank: int
    text: str
    trace: str
    error: CkptmanError | None
    errno: int | None = None


class RankFailed(Exception):
    """A step that all ranks took together failed on one of them; every rank raises it."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(f"rank {failure.rank}: {failure.text}\n{failure.trace}")

    def as_ckptman_error(self, left: str = "") -> CkptmanError:
        """Return the failed rank's error if it is one of ours, else one that names rank and cause. `left`: what state
        the failure leaves behind, added to the message."""
        ours = self.failure.error
        if ours is not None and left and type(ours) is ConfigError:
            told = ConfigError(f"{ours}. {left}")
            told.of_program = ours.of_program
            return told
        if ours is not None:
            return ours
        failed = f"rank {self.failure.rank} failed: {self.failure.text}"
        if self.failure.errno is None:  # of the code that was asked for its state, as a rule
            remedy = "Its own traceback, above this one, says where"
        else:
            remedy = "If it is the disk: check the mount, its permissions and its quota on that rank"
        return CkptmanError(". ".join(filter(None, (failed, remedy, left))))

    def raise_on_this_rank(self, left: str = "") -> NoReturn:
        """Raise `as_ckptman_error`; on the rank that failed, with the cause that its error had."""
        error = self.as_ckptman_error(left)
        raise error from (ours.__cause__ if (ours := self.failure.error) is not None else self.__cause__ or self)


class Contribution(NamedTuple):
    """What a rank brings to `Channel.agree`."""

    value: Any = None
    """Sent to the others only if it is not the same on every rank. Its `repr` is compared, or that of `key`."""
    key: Any = None
    maxima: tuple[int, ...] = ()
    """Integers of which every rank gets the highest."""
    told: Any = None
    """What the leader tells the others."""


class Agreement(NamedTuple):
    """What the ranks agreed on."""

    unlike: list[Any] | None
    """The values of all ranks, in order of rank; None: they are the same."""
    maxima: tuple[int, ...]
    told: Any


_MAXIMA, _TOLD_WORDS = 8, 120
_LOWEST = -(2**63)
_SENT_APART = 2**31
"""Stands for the length of what the leader tells where that takes a broadcast of its own."""


def refuse_other_calls(verbs: Sequence[str]) -> None:
    """Refuse that ranks, in order, do not do the same. Raises: ConfigError."""
    for rank, verb in enumerate(verbs):
        if verb != verbs[0]:
            raise ConfigError(
                f"rank 0 is in {verbs[0]} and rank {rank} in {verb}: every rank calls the same methods of its "
                f"Checkpointer, in the same order"
            )


@contextmanager
def failing_as_one() -> Iterator[None]:
    """Turn a RankFailed inside into the error of the rank that failed."""
    try:
        yield
    except RankFailed as failed:
        failed.raise_on_this_rank()


def await_ranks(timeout_seconds: float) -> None:
    """Wait in the store of the default process group until every rank has come here, and say soon who has not.

    Raises: ConfigError where one does not come within the timeout.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    group, rank, world_size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    number = _meetings[group] = _meetings.get(group, 0) + 1
    store: Any = default_store()
    prefix = f"ckptman/ranks/{number}"
    store.set(f"{prefix}/{rank}", "here")
    if store.add(f"{prefix}/count", 1) == world_size:
        store.set(f"{prefix}/all", "here")
    for seconds in (min(LATE_SECONDS, timeout_seconds), max(0.001, timeout_seconds - LATE_SECONDS)):
        try:
            store.wait([f"{prefix}/all"], timedelta(seconds=seconds))
            return
        except RuntimeError:  # also of a store that is gone, which the next call tells
            missing = [each for each in range(world_size) if not store.check([f"{prefix}/{each}"])]
        named = ", ".join(map(str, missing[:_NAMED])) + (", ..." if len(missing) > _NAMED else "")
        text = f"no Checkpointer was made on rank {named} of {world_size}, and all ranks wait: every rank makes one, "
        text += "not only rank 0 (`if rank == 0:` around it goes away)"
        if seconds == LATE_SECONDS:
            warn(text)
    raise ConfigError(f"{text}. They were waited for {timeout_seconds:g} s")


class Channel:
    """Object collectives over one group of all ranks. Without torch.distributed: a world of one rank."""

    def __init__(self, timeout_seconds: float) -> None:
        self.distributed = dist.is_available() and dist.is_initialized()
        if not self.distributed and int(os.environ.get("WORLD_SIZE", "1") or 1) > 1:
            raise ConfigError(
                f"this is one of {os.environ['WORLD_SIZE']} processes (WORLD_SIZE), and torch.distributed is not "
                f"initialised: call torch.distributed.init_process_group() before you make a Checkpointer"
            )
        self.rank = dist.get_rank() if self.distributed else 0
        self.world_size = dist.get_world_size() if self.distributed else 1
        self.is_leader = self.rank == 0
        self.group: dist.ProcessGroup | None = None
        self.lost = False
        """Whether contact was lost once: gloo's connections do not come back, only a new channel does."""
        if self.distributed:
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))

    def exchange(self, sent: Mapping[int, torch.Tensor], sizes: Mapping[int, int]) -> dict[int, torch.Tensor]:
        """Send flat bytes to some ranks, and receive from them as many as `sizes` says. Exactly these ranks call it,
        each for the others. Raises: RankLostError."""
        received = {rank: torch.empty(size, dtype=torch.uint8, device="cpu") for rank, size in sizes.items()}
        self.begin_exchange(sent, received)()
        return received

    def begin_exchange(
        self, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]
    ) -> Callable[[], None]:
        """Begin the same, into memory that is given. Returns what waits for it, and raises: RankLostError."""
        messages = [dist.P2POp(dist.isend, data, rank, self.group) for rank, data in sent.items()]
        messages += [dist.P2POp(dist.irecv, data, rank, self.group) for rank, data in received.items()]
        with self._contact():
            under_way = dist.batch_isend_irecv(messages) if messages else []

        def wait() -> None:
            with self._contact():
                for work in under_way:
                    work.wait()

        return wait

    @cached_property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks on the node of this one, itself included. Every rank asks for the first time at once."""
        nodes = self.gather(this_node(os.environ))
        return tuple(rank for rank, node in enumerate(nodes) if node == nodes[self.rank])

    def close(self) -> None:
        """Free the group. Only where all ranks get here."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None

    def broadcast(self, value: T | None) -> T:
        """Return the leader's value, on every rank."""
        box = [value]
        if self.group is not None:
            with self._contact():
                dist.broadcast_object_list(box, src=0, group=self.group)
        return cast(T, box[0])

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, on every rank, in order of rank."""
        if self.group is None:
            return [value]
        box: list[Any] = [None] * self.world_size
        with self._contact():
            dist.all_gather_object(box, value, group=self.group)
        return box

    def run_on_leader(self, work: Callable[[], T]) -> T:
        """Do `work` on the leader and hand its result to all. Raises: RankFailed on every rank if it failed there."""
        mine: T | Failure | None = self._attempt(work) if self.is_leader else None
        result = self.broadcast(mine)
        if isinstance(result, Failure):
            raise RankFailed(result)
        return cast(T, result)

    def gather_on_leader(self, local: Callable[[], T], combine: Callable[[list[T]], R]) -> R:
        """Bring each rank's result of `local` to the leader, and hand what `combine` makes of them there to all.

        Raises: RankFailed on every rank if `local` failed on any, or `combine` on the leader.
        """
        mine = self._attempt(local)
        gathered: list[Any] | None = [mine] if self.group is None else None
        if self.group is not None:
            gathered = [None] * self.world_size if self.is_leader else None
            with self._contact():
                dist.gather_object(mine, gathered, dst=0, group=self.group)
        result = self.broadcast(None if gathered is None else self._combined(gathered, combine))
        if isinstance(result, Failure):
            raise RankFailed(result)
        return cast(R, result)

    def agree(self, verb: str, work: Callable[[], Contribution | None]) -> Agreement:
        """Do `work` on each rank, and compare what it brings, by one all-reduce of a kilobyte.

        Only if the ranks differ, or `work` failed on one, is more sent. `verb`: what this rank was asked to do, in case
        that another one was asked for something else.

        Raises: RankFailed on every rank if `work` failed on one; ConfigError, if the ranks differ in `verb`.
        """
        failed: BaseException | None = None
        brought = Contribution()
        try:
            brought = work() or brought
        except (Exception, CheckpointException) as error:  # noqa: BLE001 every rank must hear of it
            failed = error
        failure = failure_of(self.rank, failed) if failed is not None else None
        if self.group is None:
            if failure is not None:
                raise RankFailed(failure) from failed
            return Agreement(None, brought.maxima, brought.told)
        told = pickle.dumps(brought.told) if self.is_leader and brought.told is not None else b""
        digests = [*_words_of(verb), *_words_of(repr(brought.value if brought.key is None else brought.key))]
        words = np.full(2 + 2 * len(digests) + _MAXIMA + _TOLD_WORDS, _LOWEST, dtype=np.int64)
        words[:2] = failure is not None, len(told) if len(told) <= 8 * _TOLD_WORDS else _SENT_APART
        words[2 : 2 + 2 * len(digests)] = [*digests, *(-each for each in digests)]
        words[-_TOLD_WORDS - _MAXIMA :][: len(brought.maxima)] = brought.maxima
        if 0 < words[1] < _SENT_APART:
            words[-_TOLD_WORDS:] = np.frombuffer(told.ljust(8 * _TOLD_WORDS, b"\0"), dtype=np.int64)
        with self._contact():
            dist.all_reduce(torch.from_numpy(words), op=dist.ReduceOp.MAX, group=self.group)
        highest, lowest = words[2 : 2 + len(digests)], -words[2 + len(digests) : 2 + 2 * len(digests)]
        if words[0]:
            first = next(each for each in self.gather(failure) if each is not None)
            raise RankFailed(first) from (failed if first.rank == self.rank else None)
        if highest[0] != lowest[0]:
            refuse_other_calls(self.gather(verb))
        if words[1] == _SENT_APART:
            told = pickle.dumps(self.broadcast(brought.told))
        elif words[1] > 0:
            told = words[-_TOLD_WORDS:].tobytes()[: int(words[1])]
        unlike = self.gather(brought.value) if (highest != lowest).any() else None
        maxima = words[-_TOLD_WORDS - _MAXIMA :][: len(brought.maxima)].tolist()
        return Agreement(unlike, tuple(maxima), pickle.loads(told) if told else None)

    def run_on_all(self, work: Callable[[], T]) -> list[T]:
        """Do `work` on each rank and hand all results to all. Raises: RankFailed on every rank if one failed."""
        with AllRanks[T](self) as ranks:
            ranks.mine = work()
        return ranks.all

    @contextmanager
    def _contact(self) -> Iterator[None]:
        # gloo's errors have no class of their own; what else could raise here is its bug or ours, with its text.
        try:
            yield
        except RuntimeError as error:
            self.lost = True
            raise RankLostError(str(error).strip().splitlines()[0]) from error

    def _combined(self, results: list[Any], combine: Callable[[list[T]], R]) -> R | Failure:
        for each in results:
            if isinstance(each, Failure):
                return each
        return self._attempt(lambda: combine(results))

    def _attempt(self, work: Callable[[], T]) -> T | Failure:
        # CheckpointException of torch is a BaseException; a rank that dies of one without telling hangs the others.
        try:
            return work()
        except (Exception, CheckpointException) as error:  # noqa: BLE001 every rank must hear of it
            return failure_of(self.rank, error)


class AllRanks(Generic[T]):
    """What every rank does inside the block, or none has done: a failure on one rank is raised on all of them.

        with AllRanks[int](channel) as ranks:
            ranks.mine = count()
        total = sum(ranks.all)

    Every rank enters it. Raises: RankFailed on every rank if one failed, RankLostError.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.mine: T = cast(T, None)
        """What this rank hands to the others, set inside the block."""
        self.all: list[T] = []
        """After the block, what each rank handed over, in order of rank."""

    def __enter__(self) -> AllRanks[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # CheckpointException of torch is a BaseException; a rank that dies of one without telling hangs the others.
        if error is not None and not isinstance(error, Exception | CheckpointException):
            return
        sent: Any = self.mine if error is None else failure_of(self._channel.rank, error)
        self.all = self._channel.gather(sent)
        for each in self.all:
            if isinstance(each, Failure):
                raise RankFailed(each) from (error if each.rank == self._channel.rank else None)


def _words_of(text: str) -> tuple[int, int]:
    """Return a digest as two integers of 63 bits, which can be negated."""
    digest = xxh3_128_intdigest(text.encode())
    return digest >> 65, digest & (2**63 - 1)


def failure_of(rank: int, error: BaseException) -> Failure:
    """Return an exception in a form that crosses ranks."""
    text = plain_lines("".join(traceback.format_exception_only(type(error), error)).strip())
    trace = "".join(traceback.format_tb(error.__traceback__))
    number = error.errno if isinstance(error, OSError) else None
    return Failure(rank, text, trace, error if isinstance(error, CkptmanError) else None, number)

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
    """Gathered only if it differs between ranks. Its `repr` is compared, or that of `key` if there is one."""
    key: Any = None
    maxima: tuple[int, ...] = ()
    """Integers; every rank gets the maxima over all ranks."""
    told: Any = None
    """What the leader tells the others."""


class Agreement(NamedTuple):
    """What the ranks agreed on."""

    unlike: list[Any] | None
    """The values of all ranks, in order of rank; None: they are the same."""
    maxima: tuple[int, ...]
    told: Any


_FAILED, _TOLD_BYTES = 0, 1
_DIGESTS, _NEGATED, _MAXIMA, _TOLD = slice(2, 6), slice(6, 10), slice(10, 18), slice(18, 138)
"""Layout of the words of a meeting: digests of verb and value, the same negated (the maximum of both gives highest and
lowest), the maxima, and what the leader tells."""
_WORDS = 138
_LOWEST = -(2**63)
_SENT_APART = 2**31
"""In place of the length: what the leader tells is too long, and follows in a broadcast."""


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
        with self.contact():
            under_way = dist.batch_isend_irecv(messages) if messages else []

        def wait() -> None:
            with self.contact():
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
            with self.contact():
                dist.broadcast_object_list(box, src=0, group=self.group)
        return cast(T, box[0])

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, on every rank, in order of rank."""
        if self.group is None:
            return [value]
        box: list[Any] = [None] * self.world_size
        with self.contact():
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
            with self.contact():
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
        meeting = Meeting(self, verb)
        meeting.begin(work)
        return meeting.end()

    def run_on_all(self, work: Callable[[], T]) -> list[T]:
        """Do `work` on each rank and hand all results to all. Raises: RankFailed on every rank if one failed."""
        with AllRanks[T](self) as ranks:
            ranks.mine = work()
        return ranks.all

    @contextmanager
    def contact(self) -> Iterator[None]:
        """Raise what gloo says in the block as RankLostError."""
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


class Meeting:
    """The all-reduce behind `Channel.agree`, which can be in flight while training continues. All meetings have one
    size, so ranks that are in different calls meet too, and the error names the calls."""

    def __init__(self, channel: Channel, verb: str) -> None:
        self._channel, self._verb = channel, verb
        self._blank = np.full(_WORDS, _LOWEST, dtype=np.int64)
        self._blank[:2] = 0
        self._blank[_DIGESTS] = [*_words_of(verb), *_words_of(repr(None))]
        self._blank[_NEGATED] = -self._blank[_DIGESTS]
        self._words = self._blank.copy()
        self._buffer = torch.from_numpy(self._words)
        self._brought, self._failed = Contribution(), cast("BaseException | None", None)
        self._work: Any = None
        self.flying = False
        """Whether it has begun and not ended."""

    def begin(self, work: Callable[[], Contribution | None]) -> None:
        """Send what `work` brings. Every rank must; none waits."""
        words, self._brought, self._failed = self._words, Contribution(), None
        words[:] = self._blank
        try:
            self._brought = work() or self._brought
            self._write(self._brought)
        except (Exception, CheckpointException) as error:  # noqa: BLE001 every rank must hear of it
            self._failed = error
            words[:] = self._blank
            words[_FAILED] = 1
        if self._channel.group is not None:
            with self._channel.contact():
                self._work = dist.all_reduce(
                    self._buffer, op=dist.ReduceOp.MAX, group=self._channel.group, async_op=True
                )
        self.flying = True

    def _write(self, brought: Contribution) -> None:
        words = self._words
        if brought.value is not None or brought.key is not None:
            value = _words_of(repr(brought.value if brought.key is None else brought.key))
            words[_DIGESTS][2:] = value
            words[_NEGATED][2:] = [-each for each in value]
        words[_MAXIMA][: len(brought.maxima)] = brought.maxima
        if self._channel.is_leader and brought.told is not None:
            told = pickle.dumps(brought.told)
            words[_TOLD_BYTES] = _SENT_APART
            if len(told) <= words[_TOLD].nbytes:
                words[_TOLD_BYTES] = len(told)
                words[_TOLD] = np.frombuffer(told.ljust(words[_TOLD].nbytes, b"\0"), dtype=np.int64)

    def end(self) -> Agreement:
        """Wait for all ranks. Raises: RankFailed, ConfigError (see `Channel.agree`), RankLostError."""
        channel, words, brought, self.flying = self._channel, self._words, self._brought, False
        if self._work is not None:
            work, self._work = self._work, None
            with channel.contact():
                work.wait()
        if words[_FAILED]:
            mine = failure_of(channel.rank, self._failed) if self._failed is not None else None
            first = next(each for each in channel.gather(mine) if each is not None)
            raise RankFailed(first) from (self._failed if first.rank == channel.rank else None)
        differs = words[_DIGESTS] != -words[_NEGATED]
        if differs[:2].any():
            refuse_other_calls(channel.gather(self._verb))
        told = brought.told
        if words[_TOLD_BYTES] == _SENT_APART:
            told = channel.broadcast(told)
        elif words[_TOLD_BYTES]:
            told = pickle.loads(words[_TOLD].tobytes()[: int(words[_TOLD_BYTES])])
        unlike = channel.gather(brought.value) if differs.any() else None
        return Agreement(unlike, tuple(words[_MAXIMA][: len(brought.maxima)].tolist()), told)


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

"""A DataLoader whose position goes into a checkpoint: what was consumed, not what was fetched ahead."""

from __future__ import annotations

import base64
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import count, islice
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from xxhash import xxh3_64_intdigest

from ckptman.data.elastic_sampler import ElasticSampler
from ckptman.errors import ConfigError
from ckptman.state.generators import RNGState
from ckptman.state.named_state import is_stateful

T = TypeVar("T")


class ResumableLoader(Generic[T]):
    """Iterate a DataLoader as ever, with its position in the state of the run.

        loader = ckptman.ResumableLoader(DataLoader(data, batch_size=32, shuffle=True))
        state = {"model": model, "optimizer": optimizer, "data": loader, "rng": ckptman.RNGState()}
        with ckptman.Checkpointer(root, state) as checkpointer:
            checkpointer.restore()
            for epoch in range(loader.epoch, epochs):
                for batch in loader:
                    ...

    The first iteration after a restore goes on behind the batches that were consumed, and is over where their epoch is.
    It does not read them again, and making it does not shift the generators that the restore has put back.

    Exact are the order of the samples, and what the dataset, `collate_fn` and the samplers draw from the generators of
    Python, NumPy and torch, in this process and in workers: there, they are seeded anew for each batch. Not exact are
    generators that a dataset keeps to itself, and what an `IterableDataset` draws while it is read: the batches that
    were consumed are read again, and thrown away.

    The position belongs to one rank, and can be restored in the middle of an epoch on as many ranks only; with an
    `ElasticSampler` it belongs to all of them, and can be restored on any number.

    Args:
        loader: A DataLoader; a StatefulDataLoader of torchdata, whose own state is used where its dataset or sampler
            has one; or another iterable that gives the same batches when it is iterated anew.

    Raises:
        ConfigError: It is an iterator, or its ElasticSampler is within a batch sampler of the user's own.
    """

    def __init__(self, loader: Iterable[T]) -> None:
        if isinstance(loader, Iterator):
            raise ConfigError(
                f"ResumableLoader: a {type(loader).__name__} can be iterated only once: give the DataLoader itself"
            )
        self.loader = loader
        self.epoch = 0
        """The number of passes that are over. One that is left early is over when the next one begins."""
        self.batch = 0
        """The number of batches consumed in this pass."""
        self._begun = self._restored = False
        self._generators: _Generators | None = None
        """What the generators were before this pass began. None: none has, or they do not matter to the order."""
        self._elastic = _Elastic.of(loader)
        self._indices = _Indices.of(loader)
        self._stateful = self._indices is None and self._elastic is None and is_stateful(loader)
        self._source = loader if self._indices is None else self._indices.loader()
        self._pass: object = None

    @property
    def per_rank(self) -> bool:
        """Tell the Checkpointer whether each rank has a position of its own."""
        return self._elastic is None

    def __len__(self) -> int:
        """Return the number of batches in a whole pass."""
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[T]:
        if self._begun and not self._restored:
            self._end(early=True)
        resumes, self._restored, self._pass = self._begun, False, object()
        return self._consume(self._resume() if resumes else self._begin(), self._pass)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain values; with an ElasticSampler the same on each rank."""
        state: dict[str, Any] = {"epoch": self.epoch, "batch": self.batch, "begun": self._begun}
        if self._elastic is not None:
            return {**state, **self._elastic.state_dict()}
        generators = self._generators or _Generators.now(self.loader, own_alone=True)
        state |= {"world_size": _world_size(), "batches": _length(self.loader), "generators": generators.as_values()}
        return {**state, "loader": self.loader.state_dict()} if self._stateful else state  # type: ignore[attr-defined]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on from a saved position.

        Raises: ConfigError: another kind of loader or number of ranks, or, within an epoch, data of another length.
        """
        kinds = "position" in state, "loader" in state
        if kinds != (self._elastic is not None, self._stateful):
            raise ConfigError(
                "the checkpoint has the position of another kind of loader: wrap the kind that it was saved with (a "
                "DataLoader, one with an ElasticSampler, or a StatefulDataLoader), or leave it out of the state"
            )
        if self._elastic is not None:
            self._elastic.load_state_dict(state)
        else:
            self._check(state)
            self._generators = _Generators.of_values(state["generators"])
            if "loader" in state:
                self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]
            elif not state["begun"]:
                self._generators.put_back_own(self.loader)
                self._generators = None
        self.epoch, self.batch, self._begun = state["epoch"], state["batch"], state["begun"]
        self._restored, self._pass = True, None

    def load_from_other_rank(self, state: Mapping[str, Any], rank: int) -> None:
        """As `load_state_dict`, on a rank that there was none of: between two epochs."""
        self.load_state_dict(state)

    def _check(self, state: Mapping[str, Any]) -> None:
        if not state["begun"] and "loader" not in state:
            return
        if state["world_size"] != _world_size():
            raise ConfigError(
                f"the position of this loader belongs to one rank of {state['world_size']}, and there are "
                f"{_world_size()} now: samples would be seen twice or never. Restore on as many ranks as saved, or "
                f"train with DataLoader(..., sampler=ckptman.ElasticSampler(len(dataset)))"
            )
        if state["batches"] != _length(self.loader):
            raise ConfigError(
                f"the checkpoint is from within an epoch of {state['batches']} batches, and this loader has "
                f"{_length(self.loader)}: use the dataset, batch size and sampler that it was saved with"
            )

    def _begin(self) -> Iterator[T]:
        self._begun, self.batch = True, 0
        if self._elastic is not None:
            self._elastic.begin(self.epoch)
        else:
            self._generators = _Generators.now(self.loader)
        return self._make(0)

    def _resume(self) -> Iterator[T]:
        now = RNGState().state_dict()
        if self._generators is not None:
            self._generators.put_back(self.loader)
        try:
            return self._make(self.batch)
        finally:
            RNGState().load_state_dict(now)

    def _make(self, consumed: int) -> Iterator[T]:
        """Make the iterator of a pass, behind the batches that were consumed."""
        if self._elastic is not None:
            consumed = 0  # its sampler begins behind them
        elif callable(set_epoch := getattr(getattr(self.loader, "sampler", None), "set_epoch", None)):
            set_epoch(self.epoch)
        if self._indices is not None:
            self._indices.restart(consumed, self._elastic)
        iterator = iter(self._source)
        if self._indices is not None:
            if consumed:
                self._indices.skip()
        elif not self._stateful:
            deque(islice(iterator, consumed), maxlen=0)
        return iterator

    def _consume(self, iterator: Iterator[T], this: object) -> Iterator[T]:
        for batch in iterator:
            if self._pass is not this:
                break
            self.batch += 1
            if self._elastic is not None:
                self._elastic.batches += 1
            yield batch
        if self._pass is not this:
            raise ConfigError(
                "this loader was iterated anew or restored while an iteration of it was going on: end that one first, "
                "or wrap a second DataLoader"
            )
        self._end()

    def _end(self, *, early: bool = False) -> None:
        self.epoch, self.batch, self._begun, self._generators = self.epoch + 1, 0, False, None
        if self._elastic is not None:
            self._elastic.end(self.epoch, early)


class _Generators(NamedTuple):
    """Generators that decide on the order of samples: those of the process, and those that a loader was given."""

    process: dict[str, Any] | None
    own: tuple[str, ...]

    @classmethod
    def now(cls, loader: object, *, own_alone: bool = False) -> _Generators:
        own = tuple(base64.b64encode(each.get_state().numpy().tobytes()).decode() for each in _own(loader))
        return cls(None if own_alone else RNGState().state_dict(), own)

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> _Generators:
        return cls(values["process"], tuple(values["own"]))

    def as_values(self) -> dict[str, Any]:
        return {"process": self.process, "own": list(self.own)}

    def put_back(self, loader: object) -> None:
        if self.process is not None:
            RNGState().load_state_dict(self.process)
        self.put_back_own(loader)

    def put_back_own(self, loader: object) -> None:
        for generator, text in zip(_own(loader), self.own):
            generator.set_state(torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8))


class _Elastic:
    """The position of an ElasticSampler, moved on by the batches that were consumed of it."""

    def __init__(self, sampler: ElasticSampler, batch_size: int, drop_last: bool) -> None:
        self.sampler = sampler
        self.batches = 0
        """Consumed since an iterator was made."""
        self._batch_size, self._drop_last = batch_size, drop_last

    @classmethod
    def of(cls, loader: object) -> _Elastic | None:
        sampler, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
        inner = getattr(batches, "sampler", None)
        if not isinstance(sampler, ElasticSampler) and not isinstance(inner, ElasticSampler):
            return None
        if batches is None:
            return cls(sampler, 1, False)  # type: ignore[arg-type]
        if type(batches) is not BatchSampler:
            raise ConfigError(
                f"ResumableLoader: an ElasticSampler within a {type(batches).__name__} says nothing about how many "
                f"samples a batch has: use DataLoader(..., batch_size=..., sampler=...)"
            )
        return cls(inner, batches.batch_size, batches.drop_last)  # type: ignore[arg-type]

    def position(self) -> int:
        step = self._batch_size * self.sampler.world_size
        left = (self.sampler.epoch + 1) * self.sampler.size - self.sampler.position
        whole = step if self._drop_last else self.sampler.world_size
        return self.sampler.position + min(self.batches * step, max(0, left) // whole * whole)

    def seeds(self) -> Iterator[int]:
        """Return a seed for each batch to come, the same however often the run was cut before it."""
        step, sampler = self._batch_size * self.sampler.world_size, self.sampler
        return (_seed(sampler.seed, sampler.rank, position) for position in count(sampler.position, step))

    def state_dict(self) -> dict[str, Any]:
        sampler = self.sampler
        return {"position": self.position(), "size": sampler.size, "seed": sampler.seed, "shuffle": sampler.shuffle}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        mine = self.state_dict()
        for name in ("size", "seed", "shuffle"):
            if state[name] != mine[name]:
                raise ConfigError(
                    f"the checkpoint was saved with ElasticSampler({name}={state[name]}), and this one has "
                    f"{name}={mine[name]}: samples would be seen twice or never. Use what it was saved with"
                )
        self.sampler.seek(state["epoch"], state["position"])
        self.batches = 0

    def begin(self, epoch: int) -> None:
        self.sampler.seek(epoch, self.sampler.position)
        self.batches = 0

    def end(self, epoch: int, early: bool) -> None:
        self.sampler.seek(epoch, epoch * self.sampler.size if early else self.position())
        self.batches = 0


_Task = tuple[int, Any]
"""For a worker: what its generators are seeded with, and the index or indices that it fetches then."""


class _Indices:
    """The indices that the samplers of a DataLoader give, from behind those that were consumed."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._given: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._rest: Iterator[Any] | None = None
        self._to_skip = self._passes = 0
        self._seeds: Iterator[int] = iter(())

    @classmethod
    def of(cls, loader: object) -> _Indices | None:
        """Return those of a loader; None where batches are not told by indices: those consumed are read again."""
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return None
        if type(loader) is DataLoader:
            return cls(loader)
        parts = (loader.dataset, loader.sampler, loader.batch_sampler)
        # A StatefulDataLoader whose parts have no state of their own is best told by indices, too.
        return cls(loader) if is_stateful(loader) and not any(map(is_stateful, parts)) else None

    def loader(self) -> DataLoader[Any]:
        """Return a loader as the one given, which takes its indices from here."""
        given = self._loader
        batches: dict[str, Any] = {"batch_size": None, "sampler": self}
        if given.batch_sampler is not None:
            batches = {"batch_sampler": self}
        if given.num_workers:
            batches |= {"prefetch_factor": given.prefetch_factor, "persistent_workers": given.persistent_workers}
        dataset: Any = _Seeded(given.dataset) if given.num_workers else given.dataset
        return DataLoader(
            dataset,
            **batches,
            num_workers=given.num_workers,
            collate_fn=given.collate_fn,
            pin_memory=given.pin_memory,
            timeout=given.timeout,
            worker_init_fn=given.worker_init_fn,
            multiprocessing_context=given.multiprocessing_context,
            generator=given.generator,
            in_order=given.in_order,
        )

    def restart(self, consumed: int, elastic: _Elastic | None) -> None:
        """Prepare a pass. Called before its iterator is made."""
        self._to_skip, self._passes = consumed, self._passes + 1
        if not self._loader.num_workers:
            return
        if elastic is not None:
            self._seeds = elastic.seeds()
            return
        own, drawn = self._loader.generator, torch.Generator()
        drawn.set_state(torch.get_rng_state() if own is None else own.get_state())
        # What the iterator is about to draw for the generators of its workers, by which no order is decided.
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=drawn).item())
        if self._loader.persistent_workers and self._passes > 1:  # then it draws for the first pass alone
            torch.empty((), dtype=torch.int64).random_(generator=own)
        self._seeds = (_seed(seed, number) for number in count(consumed))

    def skip(self) -> Iterator[Any]:
        """Draw what was drawn for the batches that were consumed, once. Returns: the indices of those to come."""
        if self._rest is None:
            self._rest = iter(self._given)
            deque(islice(self._rest, self._to_skip), maxlen=0)
        return self._rest

    def __len__(self) -> int:
        return len(self._given)

    def __iter__(self) -> Iterator[Any]:
        self._rest = None  # workers make two of them, and use the second
        return self._walk()

    def _walk(self) -> Iterator[Any]:
        for index in self.skip():
            yield (next(self._seeds), index) if self._loader.num_workers else index


class _Seeded:
    """A dataset in a worker process, whose generators are seeded anew for each batch: by its number, and not by which
    worker fetches it and what that one has fetched before."""

    def __init__(self, dataset: Any) -> None:
        self.__dict__["_dataset"] = dataset

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __reduce__(self) -> Any:
        return _Seeded, (self._dataset,)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, task: _Task) -> Any:
        seed, index = task
        _seed_all(seed)
        return self._dataset[index]

    def __getitems__(self, task: _Task) -> Any:
        seed, indices = task
        _seed_all(seed)
        if getattr(self._dataset, "__getitems__", None):
            return self._dataset.__getitems__(indices)
        return [self._dataset[each] for each in indices]


def _seed(*numbers: int) -> int:
    return xxh3_64_intdigest(repr(numbers).encode())


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def _own(loader: object) -> list[torch.Generator]:
    """Return the generators that a loader and its samplers were given, each once."""
    batches = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    found = {id(each): each for each in (getattr(holder, "generator", None) for holder in holders)}
    return [each for each in found.values() if isinstance(each, torch.Generator)]


def _length(loader: object) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:  # of an iterable dataset
        return None


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

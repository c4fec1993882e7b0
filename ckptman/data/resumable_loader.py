"""A DataLoader whose position goes into a checkpoint: what was consumed, not what was fetched ahead."""

from __future__ import annotations

import base64
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count, islice
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, get_worker_info
from xxhash import xxh3_64_intdigest

from ckptman.data.batch_digest import digest_of
from ckptman.data.elastic_sampler import ElasticSampler
from ckptman.data.prepared_loader import prepared
from ckptman.engine.state.generators import RNGState
from ckptman.engine.state.named_state import is_stateful
from ckptman.errors import ConfigError, warn_only

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

    The first iteration after a restore continues after the batches that were consumed, and ends with their epoch. It
    does not read them again, and does not change the generators that the restore has put back.

    Exact are the order of the samples, and what the dataset, `collate_fn` and the samplers draw from the generators of
    Python, NumPy and torch, in this process and in workers: there, they are seeded anew for each batch. Not exact are
    generators that a dataset keeps to itself, and what an `IterableDataset` draws while it is read: the batches that
    were consumed are read again, and thrown away.

    A pass that is left early before a `step()` of the Checkpointer, such as a look at one batch (`next(iter(loader))`),
    is no epoch: the next iteration begins where that one did. A StatefulDataLoader with its own state cannot do that.

    The position belongs to one rank, and can be restored in the middle of an epoch on as many ranks only; with an
    `ElasticSampler` it belongs to all of them, and can be restored on any number.

    Args:
        loader: A DataLoader, also one that Accelerate or Fabric has prepared; a StatefulDataLoader of torchdata, whose
            own state is used where its dataset or sampler has one; or another iterable that gives the same batches when
            it is iterated anew. Those that were consumed are read again and thrown away, and a RuntimeWarning says if
            the last of them is another one than before. Wrap the DataLoader inside a prefetcher, not the prefetcher.

    Raises:
        ConfigError: It is an iterator, its batches come out of order, or its ElasticSampler is within a batch sampler
            of the user's own.
    """

    def __init__(self, loader: Iterable[T]) -> None:
        if isinstance(loader, Iterator):
            raise ConfigError(
                f"ResumableLoader: a {type(loader).__name__} can be iterated only once: give the DataLoader itself"
            )
        if getattr(loader, "num_workers", 0) and not getattr(loader, "in_order", True):
            raise ConfigError("ResumableLoader: batches that come out of order have no position: leave in_order=False")
        self.loader = loader
        self.epoch = 0
        """The number of passes that are over. One that is left early is over when the next one begins."""
        self.batch = 0
        """The number of batches consumed in this pass."""
        self.wait_seconds = 0.0
        """For how long batches were waited for, in all."""
        self._begun = self._restored = False
        self._is_without_step = False
        """Whether a pass was over before a step ended."""
        self._has_stepped: bool | None = None
        """Whether a step has ended in this pass; None: nobody tells."""
        self._resumed: _Resumed | None = None
        """If this pass continues a restored one: what there was when it began."""
        self._looks = self._looks_left = 0
        """How often a pass was left before its first step since the last epoch ended, and how often that is still to
        come when this one is resumed."""
        self._last = ""
        """A digest of the last batch, of a loader whose batches are read again."""
        self._kind: dict[str, Any] | None = None
        """What the position of this pass is about, found once: a position is taken at each step."""
        self._own_now: tuple[str, ...] = ()
        """Generators of the loader as they were when a position was saved that is to be gone on from."""
        self._prepared = prepared(loader)
        self._elastic = _Elastic.of(loader)
        self._indices = _Indices.of(loader if self._prepared is None else self._prepared.inside)
        if self._indices is None and self._prepared is not None:
            raise ConfigError(
                "ResumableLoader: Accelerate or Fabric has prepared a loader whose batches are not told by indices (an "
                "IterableDataset, or a sampler with a state of its own): leave that loader out of prepare() and "
                "setup_dataloaders()"
            )
        self._stateful = self._indices is None and self._elastic is None and is_stateful(loader)
        self._source = loader if self._indices is None else self._indices.loader()
        self._start: PassStart | None = None
        self._pass: object = None
        """Tells the iteration that counts from others. It is not the iterator: workers end when nobody holds that."""

    @property
    def per_rank(self) -> bool:
        """Tell the Checkpointer whether each rank has a position of its own."""
        return self._elastic is None

    @property
    def dataloaders(self) -> list[object]:
        """What is inside, the loader itself included. None of them is iterated if indices tell the batches."""
        return [self.loader, *([] if self._prepared is None else [self._prepared.inside])]

    def __len__(self) -> int:
        """Return the number of batches in a whole pass; with an ElasticSampler, in this one."""
        before = self.batch - self._elastic.batches if self._elastic is not None else 0
        return before + len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __repr__(self) -> str:
        batches = _length(self)
        of = "" if batches is None else f" of {batches}"
        return f"ResumableLoader({type(self.loader).__name__}, epoch {self.epoch}, batch {self.batch}{of})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pass": None}

    def __iter__(self) -> Iterator[T]:
        if self._begun and not self._restored:
            self._leave()
        if self._is_without_step:
            self._is_without_step = False
            warn_only(
                "a pass over the training data ended without a step() of the Checkpointer, and counts as an epoch. To "
                "read the data without training, iterate the loader inside: loader.loader"
            )
        resumes, self._restored = self._begun, False
        self._pass, self._has_stepped = object(), None if self._has_stepped is None else False
        self._resumed = _Resumed(self.batch, self._last, RNGState().state_dict()) if resumes else None
        return _Pass(self, self._pass, self._resume() if resumes else self._begin())

    def note_step(self, *, has_ended: bool = True) -> None:
        """Note that a step has ended, or that steps will be noted from now on. The Checkpointer calls it."""
        self._has_stepped = has_ended or bool(self._has_stepped)
        self._is_without_step = False
        if not has_ended:
            self._looks = 0

    def end_epoch(self) -> None:
        """End this pass before its last batch: the next iteration begins a new one, also after a restore."""
        if self._begun:
            self._pass = None
            self._end(early=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain values; with an ElasticSampler the same on each rank."""
        state: dict[str, Any] = {"epoch": self.epoch, "batch": self.batch, "begun": self._begun, "looks": self._looks}
        if self._elastic is not None:
            return {**state, **self._elastic.state_dict()}
        start = self._start if self._indices is None else self._indices.start
        own = self._own_now if self._restored else _states_of(self.loader)
        state |= {"start": None if start is None else start.as_values(), "own": list(own)}
        if self._kind is None:
            self._kind = self._find_kind()
        state |= {"world_size": _world_size(), "kind": self._kind}
        if self._is_read_again:
            state["last"] = self._last
        return {**state, "loader": self.loader.state_dict()} if self._stateful else state  # type: ignore[attr-defined]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on from a saved position.

        Raises: ConfigError: another kind of loader or number of ranks, or, within an epoch, other data.
        """
        is_position = isinstance(state, Mapping) and "begun" in state and ("position" in state or "kind" in state)
        if not is_position or ("position" in state, "loader" in state) != (self._elastic is not None, self._stateful):
            raise ConfigError(
                "the checkpoint has another kind of loader under this name, or none: wrap the kind that it was saved "
                "with (a DataLoader, one with an ElasticSampler, or a StatefulDataLoader)"
            )
        if self._elastic is not None:
            self._elastic.load_state_dict(state)
        else:
            fits = self._check(state)
            self._own_now, self._last = tuple(state["own"]), state.get("last", "")
            start = None if state["start"] is None or not fits else PassStart.of_values(state["start"])
            if self._indices is not None:
                self._indices.start = start
            else:
                self._start = start
            if "loader" in state:
                self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]
            if not state["begun"]:
                _put_back(self.loader, self._own_now)
        self.epoch, self.batch, self._begun = state["epoch"], state["batch"], state["begun"]
        if _is_over(state) and (batches := _length(self.loader)) is not None:
            self.batch = batches  # which is another number with other data, and on other ranks
        self._restored, self._pass = True, None
        self._looks = self._looks_left = state.get("looks", 0)

    def load_from_other_rank(self, state: Mapping[str, Any], rank: int) -> None:
        """As `load_state_dict`, on a rank that there was none of: between two epochs."""
        self.load_state_dict(state)

    def _check(self, state: Mapping[str, Any]) -> bool:
        """Return whether a position is one of such a loader. It need not be where its pass is over."""
        saved, mine = state["kind"], self._find_kind()
        differs = [name for name, value in mine.items() if saved.get(name, value) != value]
        fits = state["world_size"] == _world_size() and not differs
        if fits or not state["begun"] or (_is_over(state) and mine["batches"] is not None):
            return fits
        if state["world_size"] != _world_size():
            raise ConfigError(
                f"the position of this loader belongs to one rank of {state['world_size']}, and there are "
                f"{_world_size()} now: samples would be seen twice or never. Restore on as many ranks as saved, or "
                f"train with DataLoader(..., sampler=ckptman.ElasticSampler(len(dataset)))"
            )
        name = differs[0]
        raise ConfigError(
            f"the checkpoint is from within an epoch of a loader with {name.replace('_', ' ')} {saved[name]}, "
            f"and this one has {mine[name]}: use the dataset, batch size and sampler that it was saved with"
        )

    def _find_kind(self) -> dict[str, Any]:
        return {**_kind_of(self.loader), "batches": _length(self.loader)}

    def _begin(self) -> Iterator[T]:
        self._begun, self.batch = True, 0
        if self._prepared is not None:
            self._prepared.begin()
        if self._elastic is not None:
            self._elastic.begin(self.epoch)
        if self._indices is not None:
            self._indices.begin()
        else:
            self._start = PassStart.now(self.loader)
        return self._make(0)

    def _resume(self) -> Iterator[T]:
        # Asked behind its last index, a sampler may draw once more, in a loader that is the same.
        is_asked_on = self._elastic is not None or self._stateful
        is_asked_on |= self._indices is not None and self._indices.start is not None
        if not is_asked_on and self.batch == _length(self.loader):
            _put_back(self.loader, self._own_now)
            return iter(())
        now = RNGState().state_dict()
        try:
            return self._make(self.batch)
        finally:
            RNGState().load_state_dict(now)
            _put_back(self.loader, self._own_now)

    def _make(self, consumed: int) -> Iterator[T]:
        """Make the iterator of a pass, behind the batches that were consumed."""
        self._kind = None
        if self._elastic is not None:
            consumed = 0  # its sampler begins behind them
        else:
            for sampler in _samplers(self.loader):
                if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                    set_epoch(self.epoch)
        if self._prepared is not None:
            self._prepared.set_epoch(self.epoch)
        if self._indices is not None:
            self._indices.restart(consumed, self._elastic)
        elif self._start is not None:
            self._start.put_back(self.loader)
        iterator = iter(self._source)
        if self._is_read_again:
            self._throw_away(iterator, consumed)
        elif self._indices is not None and consumed:
            self._indices.skip()
        return iterator if self._prepared is None else self._prepared.around(iterator, len(self) - self.batch)

    @property
    def _is_read_again(self) -> bool:
        """Whether the batches that were consumed are read again and thrown away when a pass is resumed."""
        return self._indices is None and self._elastic is None and not self._stateful

    def _throw_away(self, batches: Iterator[T], consumed: int) -> None:
        last = deque(islice(batches, consumed), maxlen=1)
        if last and self._last and digest_of(last[0]) != self._last:
            warn_only(
                f"{type(self.loader).__name__} does not give the same batches again: batch {consumed} of this epoch is "
                f"another one than before the restart, and so may be those that follow. Wrap the DataLoader inside it, "
                f"if there is one (its workers are seeded by batch), or give it generators that are in the state"
            )

    def _leave(self) -> None:
        """End a pass that was left early. If no step came of it, as of a look at a batch, it was no epoch."""
        if self._has_stepped is not False or self._stateful or (self._resumed is not None and not self._looks_left):
            self._end(early=True)
            return
        if self._elastic is not None:
            self._elastic.batches = 0
        if self._resumed is not None:
            self._looks_left -= 1
            self.batch, self._last, generators = self._resumed
            RNGState().load_state_dict(generators)
            self._restored = True
            return
        self._looks += 1
        self._begun, self.batch, self._start = False, 0, None
        if self._indices is not None:
            self._indices.start = None

    def _note_pass_without_step(self) -> None:
        """Note that a pass is over and no step has ended in it; warn if it was empty."""
        if self._has_stepped is not False:
            return
        if self._resumed is None:
            self._is_without_step = self.batch > 0
        elif self._resumed.batch == self.batch:
            warn_only(
                f"the checkpoint is from behind the last batch of epoch {self.epoch}, so this pass over the data is "
                f"empty, and what follows it, such as a validation, comes next. Averages over the pass are those of no "
                f"batch: leave them out, or keep their sums in the state"
            )

    def _end(self, *, early: bool = False) -> None:
        self.epoch, self.batch, self._begun, self._restored, self._start = self.epoch + 1, 0, False, False, None
        self._looks = self._looks_left = 0
        if self._indices is not None:
            self._indices.start = None
        if self._elastic is not None:
            self._elastic.end(self.epoch, early)


class _Resumed(NamedTuple):
    """The batches that were consumed when a pass was resumed, a digest of the last, and the generators of the
    process."""

    batch: int
    last: str
    generators: dict[str, Any]


class _Pass(Iterator[T]):
    """One iteration of a loader, which counts what it gives."""

    def __init__(self, loader: ResumableLoader[T], token: object, iterator: Iterator[T]) -> None:
        self._loader, self._token, self._iterator, self._is_over = loader, token, iterator, False

    def __next__(self) -> T:
        loader = self._loader
        if self._is_over:
            raise StopIteration
        if loader._pass is not self._token:
            raise ConfigError(
                "this loader was iterated anew or restored while an iteration of it was going on: end that one first, "
                "or wrap a second DataLoader"
            )
        begun = time.perf_counter()
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._is_over, self._iterator = True, iter(())
            loader._note_pass_without_step()
            loader._end()
            raise
        except Exception:
            self._count()  # of a batch with a sample that cannot be read: the next one comes behind it
            raise
        finally:
            loader.wait_seconds += time.perf_counter() - begun
        self._count()
        if loader._is_read_again:
            loader._last = digest_of(batch)
        return batch

    def _count(self) -> None:
        self._loader.batch += 1
        if self._loader._elastic is not None:
            self._loader._elastic.batches += 1


class PassStart(NamedTuple):
    """What the order of a pass follows from: the generators of the process and of the loader as the samplers found
    them, and the seed of its workers."""

    process: dict[str, Any]
    own: tuple[str, ...]
    seed: int | None

    @classmethod
    def now(cls, loader: object, seed: int | None = None) -> PassStart:
        return cls(RNGState().state_dict(), _states_of(loader), seed)

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> PassStart:
        return cls(values["process"], tuple(values["own"]), values["seed"])

    def as_values(self) -> dict[str, Any]:
        return {"process": self.process, "own": list(self.own), "seed": self.seed}

    def put_back(self, loader: object) -> None:
        RNGState().load_state_dict(self.process)
        _put_back(loader, self.own)


class _Elastic:
    """The position of an ElasticSampler, moved on by the batches that were consumed of it."""

    def __init__(self, sampler: ElasticSampler, batches: BatchSampler | None) -> None:
        self.sampler, self._batches = sampler, batches
        self.batches = 0
        """Consumed since an iterator was made."""

    @classmethod
    def of(cls, loader: object) -> _Elastic | None:
        found = [each for each in _samplers(loader) if isinstance(each, ElasticSampler)]
        shared_out = getattr(getattr(loader, "sampler", None), "dataset", None)
        if isinstance(getattr(shared_out, "_sampler", None), ElasticSampler):
            raise ConfigError(
                "Lightning shares out what an ElasticSampler has shared out already: set use_distributed_sampler=False "
                "in Trainer(...) or setup_dataloaders(...)"
            )
        batches = getattr(loader, "batch_sampler", None)
        if found and batches is not None and type(batches) is not BatchSampler:
            raise ConfigError(
                f"ResumableLoader: an ElasticSampler within a {type(batches).__name__} says nothing about how many "
                f"samples a batch has: use DataLoader(..., batch_size=..., sampler=...), and leave it out of "
                f"Accelerate's prepare(): the sampler itself shares out the samples among ranks"
            )
        return cls(found[0], batches) if found else None

    def _step(self) -> int:
        """Return the samples of a batch, of all ranks together."""
        return (1 if self._batches is None else self._batches.batch_size) * self.sampler.world_size

    def position(self) -> int:
        left = (self.sampler.epoch + 1) * self.sampler.size - self.sampler.position
        drops = self._batches is not None and self._batches.drop_last
        whole = self._step() if drops else self.sampler.world_size
        return self.sampler.position + min(self.batches * self._step(), max(0, left) // whole * whole)

    def seed(self) -> int:
        """Return what the workers of this pass are seeded with."""
        return _seed(self.sampler.seed, self.sampler.rank, self.sampler.epoch)

    def seeds(self) -> Iterator[int]:
        """Return a seed for each batch to come, the same however often the run was cut before it."""
        sampler = self.sampler
        return (_seed(sampler.seed, sampler.rank, position) for position in count(sampler.position, self._step()))

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
        self.start: PassStart | None = None
        """What this pass began with; None before the samplers were asked first, and with an ElasticSampler."""
        self._seed = 0
        """What the workers of this pass are seeded with."""
        self._generator = torch.Generator()
        """Where the loader draws that from. It would draw from those of the process each time that it starts workers,
        which a run does more often when it is cut."""
        self._rest: Iterator[Any] | None = None
        self._seeds: Iterator[int] = iter(())
        self._consumed, self._elastic = 0, False

    @classmethod
    def of(cls, loader: object) -> _Indices | None:
        """Return those of a loader; None where batches are not told by indices: those consumed are read again."""
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return None
        if type(loader).__iter__ is DataLoader.__iter__:
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
        dataset: Any = given.dataset
        worker_init_fn = given.worker_init_fn
        if given.num_workers:
            dataset, worker_init_fn = _Seeded(dataset), _WorkerInit(worker_init_fn)
        return DataLoader(
            dataset,
            **batches,
            num_workers=given.num_workers,
            collate_fn=given.collate_fn,
            pin_memory=given.pin_memory,
            timeout=given.timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=given.multiprocessing_context,
            generator=self._generator,
        )

    def begin(self) -> None:
        """Begin a pass: one number is drawn for it, as by a DataLoader that is iterated."""
        self.start = None
        self._seed = int(torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator).item())

    def restart(self, consumed: int, elastic: _Elastic | None) -> None:
        """Prepare what is left of a pass. Called before its iterator is made."""
        self._consumed, self._elastic = consumed, elastic is not None
        if elastic is not None:
            self._seed, self._seeds = elastic.seed(), elastic.seeds()
        elif self.start is not None and self.start.seed is not None:
            self._seed = self.start.seed
        self._generator.manual_seed(self._seed)

    def skip(self) -> Iterator[Any]:
        """Ask the samplers anew, as they were asked when this pass began, and leave out what was consumed, once.

        Returns: the indices of the batches to come.
        """
        if self._rest is None:
            if self.start is not None:
                self.start.put_back(self._loader)
            elif not self._elastic:
                self.start = PassStart.now(self._loader, self._seed)
            if not self._elastic:
                self._seeds = (_seed(self._seed, number) for number in count(self._consumed))
            self._rest = iter(self._given)
            if self._consumed:
                self._leave_out(self._rest)
        return self._rest

    def _leave_out(self, indices: Iterator[Any]) -> None:
        next(indices)
        first = RNGState().state_dict()
        deque(islice(indices, self._consumed - 1), maxlen=0)
        if RNGState().state_dict() != first:
            warn_only(
                f"{type(self._given).__name__} draws from the generators of the process while it is iterated, between "
                f"what the training draws: what is left of this epoch may not be what the run would have seen that "
                f"nobody cut. Give the sampler a generator of its own"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rest": None, "_seeds": iter(())}

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
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, task: _Task) -> Any:
        seed, index = task
        _seed_all(seed)
        return self.dataset[index]

    def __getitems__(self, task: _Task) -> Any:
        seed, indices = task
        _seed_all(seed)
        if getattr(self.dataset, "__getitems__", None):
            return self.dataset.__getitems__(indices)
        return [self.dataset[each] for each in indices]


class _WorkerInit:
    """Shows the user's own dataset to whoever asks for it in a worker, then calls the user's `worker_init_fn`."""

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self._init = init

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # it is frozen
        if self._init is not None:
            self._init(worker)


def _is_over(state: Mapping[str, Any]) -> bool:
    """Return whether a position is behind the last batch of its pass, which one with its own state knows itself."""
    knows = "kind" not in state or "loader" in state
    return not knows and bool(state["begun"]) and state["batch"] == state["kind"]["batches"]


def _seed(*numbers: int) -> int:
    return xxh3_64_intdigest(repr(numbers).encode())


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def _samplers(loader: object) -> list[object]:
    """Return the samplers of a loader, and those within them, each once: Accelerate puts one into another."""
    found: dict[int, object] = {}
    holders: list[object] = [loader]
    for holder in holders:
        for each in (getattr(holder, "sampler", None), getattr(holder, "batch_sampler", None)):
            if each is not None and id(each) not in found:
                found[id(each)] = each
                holders.append(each)
    return list(found.values())


def _own(loader: object) -> list[torch.Generator]:
    """Return the generators that a loader and its samplers were given, each once."""
    found = [getattr(holder, "generator", None) for holder in (loader, *_samplers(loader))]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def _states_of(loader: object) -> tuple[str, ...]:
    return tuple(base64.b64encode(each.get_state().numpy().tobytes()).decode() for each in _own(loader))


def _put_back(loader: object, states: Iterable[str]) -> None:
    for generator, text in zip(_own(loader), states):
        generator.set_state(torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8))


def _kind_of(loader: object) -> dict[str, Any]:
    """Return what the position within an epoch is about."""
    samplers = ", ".join(type(each).__name__ for each in _samplers(loader))
    return {
        "batches": _length(loader),
        "batch_size": getattr(loader, "batch_size", None),
        "samples": _length(getattr(loader, "dataset", None)),
        "samplers": samplers,
        "generators": len(_own(loader)),
        "seeds": [each for each in map(_seed_of, _samplers(loader)) if isinstance(each, int)],
    }


def _seed_of(sampler: object) -> object:
    """Return what a sampler makes its order of, beside its generator; None: nothing."""
    return getattr(sampler, "initial_seed", getattr(sampler, "seed", None))


def _length(sized: object) -> int | None:
    try:
        return len(sized)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # of an iterable dataset
        return None


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

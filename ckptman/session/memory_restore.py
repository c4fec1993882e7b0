"""Going on from memory: what the nodes have between them, which of it counts, and who sends what to whom."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from ckptman.engine.comm.control_group import Channel
from ckptman.engine.comm.peers import Place, ring
from ckptman.engine.saving.memory_saves import is_shared
from ckptman.engine.saving.part_exchange import PIECE_BYTES, mapped
from ckptman.errors import ConfigError, CorruptError
from ckptman.runtime.host_memory import available_bytes
from ckptman.storage.catalog.backends.node_memory import InMemory, NodeMemory, Part, found_in
from ckptman.storage.format.paths import MANIFEST, blocks_name, rank_of
from ckptman.storage.io.durable_files import DISK
from ckptman.storage.io.writer_process import shared_memory


class MemoryRestore:
    """What all nodes of a run hold in memory. Every rank has one, and calls it alike. `copies`: of each part."""

    def __init__(self, control: Channel, node: NodeMemory, places: Sequence[Place], copies: int) -> None:
        self._control, self._node, self._places = control, node, places
        self._order, self._copies = ring(places), min(copies, len(ring(places)))
        self._nodes = list(dict.fromkeys(place.node for place in places))
        self._rank_of = {name: [place.node for place in places].index(name) for name in self._nodes}
        self._mine = places[control.rank].node
        self._is_first = self._rank_of[self._mine] == control.rank
        self.damage: dict[int, str] = {}
        """Why steps that counted cannot be read at all: no node has a manifest of theirs that is whole."""

    def look(self) -> list[InMemory]:
        """Return the checkpoints that there are between all nodes, newest first, and note the `damage`."""
        firsts = list(self._rank_of.values())

        def combine(all_parts: list[list[Part]]) -> tuple[list[InMemory], dict[int, str]]:
            found = found_in({name: all_parts[rank] for name, rank in zip(self._nodes, firsts)})
            readable = {each.manifest.step for each in found}
            parts = [part for each in all_parts for part in each]
            return found, {each.step: each.damage for each in parts if each.damage and each.step not in readable}

        found, self.damage = self._control.gather_on_leader(
            lambda: self._node.parts() if self._is_first else [], combine
        )
        return found

    def finds_any(self) -> bool:
        """Return whether the nodes hold anything of this run, complete or not. Every rank calls it."""
        return bool(self.look()) or bool(self.damage)

    def folder_of(self, found: InMemory) -> Path:
        """Return where this node has its part of a checkpoint."""
        return self._node.path_of(found.manifest.step)

    def bring_shared(self, found: InMemory) -> None:
        """Have on every node what each of them needs before anything is read. Raises: RankFailed, RankLostError."""
        folder = self.folder_of(found)

        def prepare() -> None:
            if not self._is_first:
                return
            # One of another attempt may be there, of a node that comes back.
            if not (folder / MANIFEST).exists() or (folder / MANIFEST).read_bytes() != found.data:
                if self._mine not in {node for nodes in found.holders.values() for node in nodes}:
                    self._node.begin(found.manifest.step)
                self._node.commit(found.manifest.step, found.data)

        self._control.run_on_all(prepare)
        self.bring(found, [name for name in found.manifest.files if is_shared(name)])

    def bring(self, found: InMemory, files: Collection[str]) -> None:
        """Have files of a checkpoint on this node, from other nodes where it lacks them; of data files the digests,
        too. Every rank calls it, each with what it needs. Raises: RankFailed, RankLostError."""
        names = {*files, *(blocks_name(rank) for name in files if (rank := _data_rank(name)) is not None)}
        wanted = self._control.gather(sorted(names & found.manifest.files.keys()))
        needed: dict[str, set[str]] = {node: set() for node in self._nodes}
        for place, each in zip(self._places, wanted):
            needed[place.node] |= set(each)
        rounds = list(_rounds(found, needed))
        self._control.run_on_all(lambda: self._check_room(found, rounds))
        error: list[Exception] = []
        for transfers in rounds:
            self._transfer(found, transfers, error)

        def tell() -> None:
            if error:
                raise error[0]

        self._control.run_on_all(tell)
        folder = self.folder_of(found)

        def name() -> None:
            for transfers in rounds if self._is_first else ():
                if (taken := transfers.get(self._mine)) is not None:
                    DISK.rename(folder / f"{taken[1]}.part", folder / taken[1])

        self._control.run_on_all(name)

    def copy(self, found: InMemory) -> None:
        """Have each part on as many nodes as there are to be copies, for another node may be lost before the next
        checkpoint counts. Every rank calls it. Raises: RankFailed, RankLostError."""
        wanted = next((each for each in self.look() if each.data == found.data), found)
        more = _more_holders(wanted, self._order, self._copies)
        self.bring(wanted, more[self._mine] if self._is_first else ())

    def _check_room(self, found: InMemory, rounds: Sequence[Mapping[str, tuple[str, str]]]) -> None:
        size = sum(
            found.manifest.files[name].bytes
            for transfers in rounds
            for target, (_, name) in transfers.items()
            if target == self._mine
        )
        if self._is_first and size > available_bytes():
            raise ConfigError(f"{self._mine} has no memory for {size / 2**30:.1f} GiB that other nodes hold of it")

    def _transfer(self, found: InMemory, transfers: Mapping[str, tuple[str, str]], error: list[Exception]) -> None:
        """Send and receive one file at most. What goes wrong is kept: who waits for the bytes gets some."""
        if not self._is_first:
            return
        sends = next(((target, name) for target, (source, name) in transfers.items() if source == self._mine), None)
        takes = transfers.get(self._mine)
        folder = self.folder_of(found)
        sent = received = torch.empty(0, dtype=torch.uint8, device="cpu")
        to, source = -1, -1
        if sends is not None:
            to, name = self._rank_of[sends[0]], sends[1]
            try:
                sent = mapped(folder / name, found.manifest.files[name].bytes)
            except Exception as failed:  # noqa: BLE001
                error.append(failed)
                sent = torch.zeros(found.manifest.files[name].bytes, dtype=torch.uint8, device="cpu")
        if takes is not None:
            source, name = self._rank_of[takes[0]], takes[1]
            size = found.manifest.files[name].bytes
            try:
                DISK.remove_file(folder / f"{name}.part")
                memory, _ = shared_memory(size, folder / f"{name}.part")
                received = torch.frombuffer(memory, dtype=torch.uint8)
            except Exception as failed:  # noqa: BLE001
                error.append(failed)
                received = torch.empty(size, dtype=torch.uint8, device="cpu")
        for begin in range(0, max(len(sent), len(received)), PIECE_BYTES):
            end = begin + PIECE_BYTES
            self._control.begin_exchange(
                {to: sent[begin:end]} if begin < len(sent) else {},
                {source: received[begin:end]} if begin < len(received) else {},
            )()


def _more_holders(found: InMemory, order: Sequence[str], copies: int) -> dict[str, list[str]]:
    """Return for each node the data files it is to get: each goes to nodes that follow one that has it, until
    `copies` have it. `order`: of all nodes."""
    more: dict[str, list[str]] = {node: [] for node in order}
    for name in sorted(found.manifest.files):
        having = [node for node in order if node in found.holders.get(name, ())]
        if _data_rank(name) is not None and having:
            at = order.index(having[0])
            others = [node for node in (*order[at:], *order[:at]) if node not in having]
            for node in others[: max(0, copies - len(having))]:
                more[node].append(name)
    return more


def _rounds(found: InMemory, needed: Mapping[str, Collection[str]]) -> Iterator[dict[str, tuple[str, str]]]:
    """Yield who gets what from whom, by target: in each round a node sends one file at most, and gets one at most.

    Raises: CorruptError where no node has a file.
    """
    left = {
        node: [name for name in sorted(names) if node not in found.holders.get(name, ())]
        for node, names in needed.items()
    }
    for names in left.values():
        for name in names:
            if not found.holders.get(name):
                raise CorruptError(f"step {found.manifest.step} in memory: no node has {name} any more")
    while any(left.values()):
        transfers: dict[str, tuple[str, str]] = {}
        busy: set[str] = set()
        for node, names in left.items():
            for name in names:
                source = next((each for each in found.holders[name] if each not in busy), None)
                if source is not None:
                    transfers[node] = source, name
                    busy.add(source)
                    names.remove(name)
                    break
        yield transfers


def _data_rank(name: str) -> int | None:
    return rank_of(name) if name.startswith("__") else None

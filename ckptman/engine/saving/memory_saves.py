"""Saves to memory: what is staged becomes a checkpoint where it is, and each part goes to another node.

The slot that a rank has staged in is a file in memory, and gets a name in a checkpoint's folder: nothing is copied but
to the peers. A checkpoint counts when every part is on as many nodes as was asked for; only then does the one before
go, and its slot is staged in again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ckptman.engine.comm.control_group import Channel, RankFailed
from ckptman.engine.comm.peers import Place, losable_nodes, receivers
from ckptman.engine.saving.draft import SaveInfo, manifest_of
from ckptman.engine.saving.part_exchange import PartExchange
from ckptman.engine.saving.save_checks import OnNonfinite
from ckptman.engine.saving.staging import RESERVE_BYTES, Slot, Staged, Stager
from ckptman.engine.saving.writer import CheckpointWriter, Content, FailedStage, SaveReport
from ckptman.errors import CkptmanError, RankLostError
from ckptman.policies.tiers import MemoryTier
from ckptman.runtime.host_memory import available_bytes
from ckptman.storage.catalog.backends.node_memory import NodeMemory
from ckptman.storage.catalog.catalog import Catalog, Entry
from ckptman.storage.format.manifest import FileRecord, Manifest, Nonfinite, parse_manifest
from ckptman.storage.format.paths import new_nonce, values_name
from ckptman.storage.io.durable_files import DISK
from ckptman.storage.io.threads import Task, Worker

_TRIES = 3
"""After so many saves in a row that failed nothing is saved to memory any more."""
_ROOM_BYTES = 64 * 1024 * 1024
"""What is left free in the folder for others, such as the workers of loaders."""
RETRY_SECONDS = 10.0
"""How long after one that failed the next one is tried."""
SLOTS = 3
"""One for the checkpoint that counts, one for the next, and one for what is being written to disk."""


class MemorySaves:
    """Makes the checkpoints of a run in the memory of its nodes, one at a time. Every rank has one, and calls it alike.

    Args:
        node: what this node holds, which is open.
        places: where each rank is.
        channel: of these saves alone.
        in_memory: slots become part of checkpoints; otherwise, on a disk of the node, what is in them is written there.
    """

    def __init__(
        self,
        tier: MemoryTier,
        node: NodeMemory,
        places: Sequence[Place],
        channel: Channel,
        stager: Stager,
        nonfinite: OnNonfinite,
        *,
        in_memory: bool = True,
    ) -> None:
        self._in_memory = in_memory
        self.tier, self.node, self._places, self._stager = tier, node, places, stager
        self.channel = channel
        self._is_first = [place.node for place in places].index(places[channel.rank].node) == channel.rank
        self._neighbours = [rank for rank, place in enumerate(places) if place.node == places[channel.rank].node]
        self._receivers = receivers(places, tier.copies)
        self._exchange = PartExchange(channel, node.slots, self._receivers, durable=not in_memory)
        # What is not finite is for the save to disk to refuse.
        self._writer = CheckpointWriter("keep" if nonfinite == "refuse" else nonfinite)
        self._worker = Worker("ckptman-memory")
        self._running: Task[SaveReport] | None = None
        self._staging: Slot | None = None
        self._committed: Slot | None = None
        self._failures = 0
        self._again_at = 0.0
        self._manifest: Manifest | None = None
        """Of the checkpoint that counts; None: this process has made none."""
        self.off = ""
        """Why nothing is saved to memory any more; "": it is."""
        self.disk_is_busy: Callable[[], bool] = lambda: False
        """Whether this rank is writing to disk, to which copies for peers give way."""
        stager.kept = self._kept
        if in_memory:
            stager.slots = SLOTS
            stager.new_file = lambda: node.slots / f"rank-{channel.rank:05d}-{new_nonce()}"

    @property
    def lost_nodes(self) -> int:
        """How many nodes may be lost, whichever they are, before a checkpoint is."""
        node_of = [place.node for place in self._places]
        holders = {
            str(rank): [node_of[rank], *(node_of[peer] for peer in peers)] for rank, peers in enumerate(self._receivers)
        }
        return losable_nodes(holders)

    @property
    def is_ready(self) -> bool:
        """Whether a save would begin now, on this rank."""
        is_idle = self._running is None and time.monotonic() >= self._again_at
        return not self.off and is_idle and self._stager.has_free_slot()

    def plan(self, control: Channel, slot_bytes: int) -> None:
        """See that there is memory for slots of this size, and for copies of the parts of others. Every rank calls it,
        over `control`, when it has staged nothing yet."""
        if why := next(filter(None, control.gather(self.off)), ""):
            self.turn_off(why)
            return
        self.forget()
        sizes = control.gather(slot_bytes)
        mine = SLOTS * slot_bytes + self._exchange.needs_bytes(sizes), self._stager.held_bytes
        taken = control.gather(mine)
        needed, held = (sum(each) for each in zip(*(taken[rank] for rank in self._neighbours)))
        try:
            trouble = self._too_much(needed, held)
            self._worker.start()
            if not trouble and self._in_memory:
                self._stager.make_slots(2)  # one that counts, and one that is free for the next
        except Exception as error:  # noqa: BLE001 whatever it is, all ranks do without then
            trouble = f"{type(error).__name__}: {error}"
        if said := next(filter(None, control.gather(trouble)), ""):
            self.turn_off(said)

    def _too_much(self, needed: int, held: int) -> str:
        """Return why there is no room for so many bytes on this node, of which slots hold some already; "": there is.
        The checkpoint that the run went on from lies beside them until the next one counts. Raises: OSError."""
        would = f"checkpoints there take {_gib(needed)} on {self.node.node}"
        most, found = self.tier.max_bytes, os.statvfs(self.node.base)
        left = available_bytes() + held - RESERVE_BYTES * len(self._neighbours) if self._in_memory else needed
        room = found.f_bavail * found.f_frsize + held - _ROOM_BYTES
        if most is not None and needed > most:
            return f"{would}, and max_bytes allows {_gib(most)}"
        if needed > left:
            return f"{would}, and {_gib(max(0, left))} are left there. Ask for more memory (sbatch --mem)"
        if needed > room:
            room_text = _gib(max(0, room))
            return f"{would}, and {self.node.base} has room for {room_text}: make it larger, or name another path"
        return ""

    def begin(self, content: Content | FailedStage, info: SaveInfo, begun: float, stall_seconds: float) -> None:
        """Make what is staged a checkpoint, behind the training. Every rank calls it; `is_ready` was so on one."""
        self.wait()
        self.poll()
        slot = None
        if isinstance(content, Content):
            assert isinstance(content.tensors, Staged)
            self._staging = slot = content.tensors.slot
            content = replace(content, watch=None)
        work = partial(self._save, content, slot, info, begun, stall_seconds)
        try:
            self._running = self._worker.submit(work)
        except RuntimeError:
            self._staging = None
            raise

    def wait(self) -> None:
        """Wait until nothing is being saved to memory."""
        if self._running is not None:
            self._running.wait()

    def poll(self) -> tuple[SaveReport | None, str]:
        """Return the report of a save that has ended since the last call, or why it failed."""
        if self._running is None or not self._running.done():
            return None, ""
        task, self._running = self._running, None
        try:
            return task.result(), ""
        except Exception as error:  # noqa: BLE001 whatever it is, the disk has what counts
            if isinstance(error, RankFailed) and isinstance(error.failure.error, _NonfiniteError):
                return None, str(error.failure.error)
            self._failures += 1
            self._again_at = time.monotonic() + RETRY_SECONDS
            why = f"{type(error).__name__}: {error}"
            if isinstance(error, RankFailed):
                why = f"rank {error.failure.rank}: {error.failure.text}"
            if isinstance(error, RankLostError) or self._failures >= _TRIES:
                self.turn_off(why)
            return None, why

    def turn_off(self, why: str) -> None:
        """Save nothing to memory any more."""
        self.off = self.off or why
        self._stager.new_file = lambda: None

    def forget(self) -> None:
        """Let go of slots that were given up. The checkpoint that counts keeps what is in them."""
        self.wait()
        self._committed = self._staging = None
        self._exchange.forget()

    @property
    def saved_step(self) -> int | None:
        """The step of the newest checkpoint in memory that counts; None: there is none."""
        manifest = self._manifest
        return manifest.step if manifest is not None else None

    def keep_only(self, step: int | None) -> None:
        """Remove all that this node holds but the checkpoint of `step`. The first rank of a node does."""
        if self._is_first:
            for part in self.node.parts():
                if part.step != step:
                    self.node.drop(part.step)

    def close(self) -> None:
        """Stop what runs. What counts stays."""
        self._worker.close()
        self._writer.close()
        self._exchange.close()

    def clear(self) -> None:
        """Remove all that this node holds: nobody will go on from it, and all ranks have closed."""
        if self._is_first:
            with contextlib.suppress(OSError):
                self.node.clear()

    # ---- one save ----------------------------------------------------------------------------------------------

    def _save(
        self, content: Content | FailedStage, slot: Slot | None, info: SaveInfo, begun: float, stall_seconds: float
    ) -> SaveReport:
        channel, folder = self.channel, self.node.path_of(info.step)
        draft = _MemoryDraft(folder, info, self._manifest)
        is_whole = False
        try:
            channel.run_on_all(lambda: self.node.begin(info.step) if self._is_first else None)
            self._writer.save(channel, draft, content)
            manifest = parse_manifest(folder, self._share(folder, draft.data))
            self._exchange.run(folder, manifest, self._give_way)
            # Every part is where it should be. The one before goes when no node can fail to have this one.
            is_whole = True
            channel.run_on_all(lambda: self.node.commit(info.step, manifest.to_json()) if self._is_first else None)
        except BaseException as error:
            if is_whole and isinstance(error, RankLostError):
                raise  # others may know nothing of that loss, and let the one before go: then this one counts
            self._staging = None
            with contextlib.suppress(Exception):
                if self._is_first:
                    self.node.drop(info.step)
            self._exchange.keep_only(self._manifest.step if self._manifest is not None else None)
            self._stager.freed()
            raise
        try:
            with contextlib.suppress(OSError):
                self.keep_only(info.step)
            channel.gather(None)  # nobody stages in a slot that is part of a checkpoint
        finally:
            # In this order: what is in neither is free.
            self._committed, self._manifest = slot if self._in_memory else None, manifest
            self._staging = None
        self._exchange.keep_only(info.step)
        self._failures = 0
        self._stager.freed()
        return SaveReport(info.step, stall_seconds, time.monotonic() - begun)

    def _share(self, folder: Path, manifest: bytes) -> bytes:
        """Have on each node what belongs to no rank's part. Returns the manifest."""

        own = values_name(self.channel.rank)

        def values() -> dict[str, bytes]:
            with contextlib.suppress(FileNotFoundError):
                return {own: (folder / own).read_bytes()}
            return {}

        before = self._manifest.files if self._manifest is not None else {}

        def combine(all_values: list[dict[str, bytes]]) -> tuple[bytes, dict[str, bytes | None]]:
            files = {name: data for each in all_values for name, data in each.items()}
            records = parse_manifest(folder, manifest).files
            # What is as it was, such as the places of all tensors, each node has.
            return manifest, {
                name: None if before.get(name) == record else files.get(name) or (folder / name).read_bytes()
                for name, record in records.items()
                if is_shared(name)
            }

        manifest, shared = self.channel.gather_on_leader(values, combine)

        def take() -> None:
            for name, data in shared.items() if self._is_first else ():
                if (folder / name).exists():
                    continue
                if data is not None:
                    DISK.write_file(folder / name, data)
                elif self._manifest is not None:
                    DISK.link(self.node.path_of(self._manifest.step) / name, folder / name)

        self.channel.run_on_all(take)
        return manifest

    def _give_way(self, seconds: float) -> None:
        if self.disk_is_busy():
            time.sleep(seconds)

    def _kept(self) -> Collection[Slot]:
        return [slot for slot in (self._staging, self._committed) if slot is not None]


def is_shared(name: str) -> bool:
    """Return whether a file of a checkpoint is on every node that holds some of it."""
    return not name.startswith(("__", "blocks-"))


class _MemoryDraft:
    """A checkpoint in memory that does not count yet: each node has made its folder, and its manifest is kept here."""

    in_memory = True

    def __init__(self, final: Path, info: SaveInfo, before: Manifest | None) -> None:
        self.final, self.info, self._before = final, info, before
        self.size_bytes = 0
        self.data = b""
        """The bytes of its manifest."""

    def begin(self) -> str:
        """See `SaveTarget`."""
        return str(self.final)

    def here(self, folder: str) -> Path:
        """Return the folder of this node, which may have another path than that of the leader."""
        return self.final

    @property
    def folder(self) -> Path:
        """See `SaveTarget`."""
        return self.final

    def commit(self, files: dict[str, FileRecord], world_size: int, nonfinite: Nonfinite | None = None) -> None:
        """Keep the manifest, until every part is where it should be."""
        sequence = 1 + Catalog(self.final.parent).last_sequence()
        manifest = manifest_of(self.info, sequence, files, world_size, nonfinite)
        if (
            (nonfinite_reason := _nonfinite_reason(manifest))
            and self._before is not None
            and not _nonfinite_reason(self._before)
        ):
            raise _NonfiniteError(f"NaN or infinity in {nonfinite_reason}: the one before stays in memory")
        self.data, self.size_bytes = manifest.to_json(), manifest.total_bytes

    def abandon(self) -> None:
        """Do nothing: each node removes its own."""


class _NonfiniteError(CkptmanError):
    """What is not finite does not take the place of what is."""


def _nonfinite_reason(manifest: Manifest) -> str:
    return Entry(manifest.step, Path(), manifest).nonfinite_reason


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"

"""A run's memory tier: opened on all ranks or on none, and told to the journal. What cannot be in memory is on disk."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ckptman.engine.comm.control_group import AllRanks, Channel, RankFailed
from ckptman.engine.comm.peers import Place
from ckptman.engine.saving.memory_saves import MemorySaves
from ckptman.engine.saving.save_checks import OnNonfinite
from ckptman.engine.saving.saver import Saver
from ckptman.engine.saving.staging import Stager
from ckptman.errors import CkptmanError, ConfigError, RankLostError, plain, warn_only
from ckptman.jobs.slurm.commands import ended_jobs
from ckptman.policies.tiers import MemoryTier
from ckptman.runtime.outcome import this_node
from ckptman.session.memory_restore import MemoryRestore
from ckptman.session.run_session import RunSession
from ckptman.session.timings import SaveTimes
from ckptman.storage.catalog.backends.node_memory import NodeMemory, Owner, job_ids, left_behind
from ckptman.storage.catalog.backends.run_store import RunStore
from ckptman.storage.catalog.catalog import Entry, any_will_do, attempt_and_step
from ckptman.storage.catalog.tiers import make_identity
from ckptman.storage.format.paths import MEMORY_PATH, new_nonce
from ckptman.storage.io.durable_files import DISK
from ckptman.storage.io.mount import MEMORY, family_of, find_mount, read_mounts

_AGE_SECONDS = 3600.0
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class RunMemory:
    """What a run keeps in the memory of its nodes. Every rank has one, and calls it alike.

    Attributes: `saves` makes checkpoints there, `restore` goes on from one.
    """

    def __init__(self, session: RunSession, node: NodeMemory, saves: MemorySaves, restore: MemoryRestore) -> None:
        self._session, self._node, self.saves, self.restore = session, node, saves, restore
        self._told_off = False

    @classmethod
    def open(
        cls,
        tier: MemoryTier,
        control: Channel,
        session: RunSession,
        saver: Saver,
        nonfinite: OnNonfinite,
        channel: Callable[[], Channel],
    ) -> RunMemory | None:
        """Open the folders of all nodes. None where one cannot be used: a warning has said why.

        `channel`: makes that of saves to memory. Every rank calls it. Raises: RankLostError.
        """
        node: NodeMemory | None = None
        try:
            if saver.stager is None:
                raise ConfigError("async_save=False leaves no private copy that could become one in memory")
            root_id = control.run_on_leader(lambda: make_identity(session.root, session.run_id))
            node = NodeMemory(Path(str(tier.path)), root_id, this_node(os.environ))
            owner = Owner.of_this_process(root_id, session.root, node.node, session.run_id, session.job_id)
            places = _meet(control, node, owner)
            session.outrank(control, max((each.order[0] for each in node.parts()), default=0))
        except (RankFailed, CkptmanError) as error:
            if isinstance(error, RankLostError):
                raise
            if node is not None:
                node.close()
            why = error.failure.error or error.failure.text if isinstance(error, RankFailed) else error
            _tell_off(session, str(why))
            return None
        mount = find_mount(read_mounts(), os.path.realpath(node.base))
        in_memory = mount is None or family_of(mount) is MEMORY
        saves = MemorySaves(tier, node, places, channel(), saver.stager, nonfinite, in_memory=in_memory)
        saves.disk_is_busy = lambda: saver.is_writing
        found = cls(session, node, saves, MemoryRestore(control, node, places, tier.copies))
        found._tell_on(tier, places)
        if session.journal is not None and mount is not None and not in_memory and str(tier.path) == MEMORY_PATH:
            warn_only(
                f"{node.base} is not in memory here, but on {family_of(mount).name}: saves there are written "
                f"to that disk. Name a folder in memory (mount -t tmpfs), or a disk of the node's own on purpose"
            )
        return found

    def clear_if_on_disk(self, newest: tuple[int, int]) -> None:
        """Remove what is in memory where the disk is as new. Every rank calls it, when all have closed `saves`.

        `newest`: attempt and step of the newest checkpoint on disk.
        """
        if all(part.order <= newest for part in self._node.parts()):
            self.saves.clear()
        self.saves.channel.close()

    def plan(self, control: Channel, saver: Saver) -> None:
        """See that there is memory for what the saver has planned. Every rank calls it, over `control`."""
        self.end_without(saver.stager)
        self.saves.plan(control, saver.slot_bytes)

    def end_without(self, stager: Stager | None) -> None:
        """Save nothing to memory any more where nothing makes private copies: what is saved there is one."""
        if stager is None:
            self.saves.turn_off("saves block the training, as there is no memory for a private copy")

    def account(self, times: SaveTimes) -> None:
        """Let the policy know how the last save to memory ended."""
        report, failed = self.saves.poll()
        if report is not None:
            is_first = times.durable_step is None
            times.ended(report)
            if is_first:
                seconds, stall_seconds = report.durable_seconds, report.stall_seconds
                self._session.note("memory_saved", step=report.step, seconds=seconds, stall_seconds=stall_seconds)
        elif failed:
            times.failed()
            self._session.note("memory_save_failed", cause=failed)
        if self.saves.off and not self._told_off:
            self._told_off = True
            _tell_off(self._session, self.saves.off)

    def close(self) -> None:
        """Stop saving to memory. What counts there stays."""
        self.saves.close()
        self._node.close()

    def _tell_on(self, tier: MemoryTier, places: Sequence[Place]) -> None:
        nodes = len({place.node for place in places})
        copies, lost = min(tier.copies, nodes), self.saves.lost_nodes
        self._session.note("memory_on", nodes=nodes, copies=copies, lost_nodes=lost, path=str(tier.path))
        if self._session.journal is None:
            return
        if copies < tier.copies:
            warn_only(
                f"checkpoints in memory have {copies} {'copy' if copies == 1 else 'copies'} instead of {tier.copies}, "
                f"as there {'is' if nodes == 1 else 'are'} {nodes} node{'' if nodes == 1 else 's'}: they outlive "
                f"processes, and {'no node' if lost == 0 else f'any {lost} of the nodes'}"
            )


def _meet(control: Channel, node: NodeMemory, owner: Owner) -> list[Place]:
    """Open the folder of this node on each of its ranks, and return where each rank is.

    Raises on every rank alike: RankFailed; ConfigError, ranks of a node do not see the same memory.
    """
    with AllRanks[tuple[Place, str, str]](control) as ranks:
        _refuse_copy(node, owner)
        node.open(owner)
        ranks.mine = Place(node.node, _domain(os.environ)), new_nonce(), _boot_id()
    places = [place for place, _, _ in ranks.all]
    nonces = [nonce for _, nonce, _ in ranks.all]
    _tell_same_host(control, {place.node: boot for place, _, boot in ranks.all})
    first = [place.node for place in places].index(node.node)
    mark = node.folder / f"seen-{nonces[first]}"

    def tidy() -> None:
        if control.rank == first:
            for path in [*node.slots.iterdir(), *node.folder.glob("seen-*")]:
                DISK.remove_file(path)  # of ranks that are gone; checkpoints keep what is theirs
            mark.touch(0o600)
            _clear_what_is_over(node)

    control.run_on_all(tidy)
    blind = control.gather("" if mark.exists() else node.node)
    control.gather(None)
    if control.rank == first:
        DISK.remove_file(mark)
    if name := next(filter(None, blind), ""):
        raise ConfigError(
            f"the ranks of {name} do not see the same {node.base}: it is private to each container. Start one "
            f"container per node, or bind the same folder into all"
        )
    return places


def _refuse_copy(node: NodeMemory, owner: Owner) -> None:
    """Refuse what belongs to the root that this one is a copy of. Raises: ConfigError."""
    try:
        other = Path(node.owner().root)
        is_another = other.exists() and not other.samefile(owner.root)
    except (CkptmanError, OSError):  # nobody's, or gone: a root may be moved
        return
    if is_another:
        raise ConfigError(
            f"{node.folder} holds what {plain(str(other))} has in memory, and {plain(owner.root)} has the same "
            f"identity, so one of them is a copy of the other: remove .ckptman/root.json in the copy"
        )


def _clear_what_is_over(node: NodeMemory) -> None:
    """Remove what runs on this node left, where their job is over, or nobody has used it for an hour."""
    is_over = ended_jobs(job_ids(node.base) - {os.environ.get("SLURM_JOB_ID", "")}, os.environ)
    for other in left_behind(node.base, is_over, but=node.folder):
        with contextlib.suppress(OSError, CkptmanError):
            if other.owner().job_id is not None or other.age_seconds > _AGE_SECONDS:
                other.clear()


def _tell_same_host(control: Channel, boots: Mapping[str, str]) -> None:
    """Warn of nodes that are one host by another name."""
    hosts: dict[str, list[str]] = {}
    for name, boot in boots.items():
        hosts.setdefault(boot, []).append(name)
    same = next((names for boot, names in hosts.items() if boot and len(names) > 1), None)
    if same and control.is_leader:
        warn_only(
            f"{same[0]} and {same[1]} are one host, as its kernel says: a copy that one keeps for the other outlives "
            f"processes, and not that host"
        )


def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return _BOOT.read_text(encoding="ascii").strip()
    return ""


def _domain(environ: Mapping[str, str]) -> str:
    """Return what fails together with this node, as far as Slurm tells: the switches above it."""
    return environ.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0]


def _tell_off(session: RunSession, why: str) -> None:
    session.note("memory_off", reason=why)
    if session.journal is not None:
        warn_only(f"nothing is saved to memory, and training goes on with disk alone: {why}")


def newest_on_disk(store: RunStore) -> tuple[int, int]:
    """Return attempt and step of the newest checkpoint of a root; (0, -1) where there is none. Raises: CkptmanError."""
    return attempt_and_step(store.list(until=any_will_do))


def age_on_disk(session: RunSession, newest: Entry | None) -> tuple[int, float]:
    """Return the step of the newest checkpoint on disk, 0 where there is none, and how many seconds ago it was made, or
    the run began. The leader's counts."""
    if newest is not None:
        return newest.step, max(0.0, time.time() - newest.require_manifest().time_seconds)
    return 0, max(0.0, time.time() - session.begun_seconds())

"""Bringing to disk what the nodes of a run hold in memory, after an attempt that ended without a save.

One process on each node that is left does it, all at about the same time, and without a network: the root is where they
meet. Each tells there what its node holds, and brings its share of the newest checkpoint that is complete between them;
whoever sees that nothing is missing commits it.

    step-0000000120.tmp-1f3a5b7c-1/          of one process: what its node holds, and the files that it is writing
    step-0000000120.tmp-copy-<its identity>/ the draft: files are moved there when all their bytes are right and durable

Nobody waits for whoever is gone: a process says by its lease that it is alive, and the claim on the root goes to one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ckptman.errors import BusyError, CkptmanError, CorruptError, NotFoundError, RootError
from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.catalog.backends.node_memory import InMemory, NodeMemory, Part, found_in
from ckptman.storage.catalog.catalog import any_will_do, attempt_and_step, look_at
from ckptman.storage.catalog.reader_lease import lease, look
from ckptman.storage.catalog.rollback_records import left_by, read_rollbacks
from ckptman.storage.catalog.writer_lock import claim
from ckptman.storage.format.manifest import FORMAT_VERSION, MOST_BYTES, Manifest, parse_manifest, parse_versioned
from ckptman.storage.format.paths import parse_step, step_folder
from ckptman.storage.format.sealed_json import seal, unseal
from ckptman.storage.io.checksums import BlockDigester
from ckptman.storage.io.durable_files import DISK, holding
from ckptman.storage.io.file_reader import FileReader
from ckptman.storage.io.safe_open import read_regular
from ckptman.storage.io.threads import STRIDE_BYTES, aligned_memory, io_threads

TIMEOUT_SECONDS = 120.0
_LOOK_SECONDS = 0.2
_LOOKS_PER_SECOND = 50
"""Of all nodes together, where there are many: each reads what all others say."""
_LINGER_SECONDS = 1.0
_BEAT_SECONDS = 1.0
_OFFER = "offer.json"
_NOTHING = (0, -1)
"""Before all attempts and steps."""


class _Held(BaseModel):
    """What a node has of one checkpoint. `identity`: of its manifest, "" where the node has none."""

    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)
    step: Annotated[int, Field(ge=0)]
    identity: Annotated[str, Field(pattern="^([0-9a-f]{32})?$")]
    sizes: dict[str, int]


class _Offer(BaseModel):
    """What a node has in memory, as it tells the others. The manifests are in files beside it."""

    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)
    format_version: int = FORMAT_VERSION
    node: str
    held: list[_Held]


@dataclass(frozen=True)
class _Candidate:
    """A checkpoint in memory that is newer than what is on disk. `there`: its files that are in the draft already."""

    found: InMemory
    draft: Path
    there: frozenset[str]

    @property
    def left(self) -> list[str]:
        """Files that are still to be brought."""
        return [name for name in self.found.manifest.files if name not in self.there]

    @property
    def missing(self) -> list[str]:
        """Files that nobody can bring."""
        return [name for name in self.left if not self.found.holders.get(name)]


@dataclass(frozen=True)
class Flushed:
    """How a flush ended.

    `step`: of the newest checkpoint on disk; None: there is none. `why`: what that means, in words. `files`, `bytes`:
    what this process has brought. `committed`: the step that it made a checkpoint; None: another process did, or it was
    not needed.
    """

    step: int | None
    why: str
    files: int = 0
    bytes: int = 0
    committed: int | None = None


def flush(
    root: Path,
    memory: NodeMemory,
    *,
    nodes: int | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Flushed:
    """Bring the newest checkpoint that nodes hold in memory to the root, where that has none that is as new.

    Called on each node that is left, by one process. Interrupted anywhere, it can be called again.

    Args:
        memory: What this node holds of the run.
        nodes: How many nodes are left; None: more may come, until nothing has for `timeout_seconds`.
        timeout_seconds: How long nothing may come from other nodes.

    Raises:
        BusyError: The run is alive.
        NotFoundError: What the nodes have between them is not complete.
        CorruptError: The same, because bytes have changed in memory.
        ConfigError: Others may have put there what is in memory.
        RootError: The root cannot be read or written.
    """
    if memory.is_there() and memory.is_alive():
        owner = memory.owner()
        raise BusyError(str(root), owner.node, owner.pid, owner.job_id)
    try:
        return _Flush(root, memory, nodes, timeout_seconds).run()
    except CkptmanError:
        raise
    except OSError as error:
        raise RootError(
            error.errno or errno.EIO,
            f"{error.filename or root}: {error.strerror or error}: make room, or check the mount, and flush again as "
            f"long as the nodes are there",
        ) from error


class _Flush:
    """One process that flushes."""

    def __init__(self, root: Path, memory: NodeMemory, nodes: int | None, timeout_seconds: float) -> None:
        self._root, self._memory = root, memory
        self._nodes, self._timeout_seconds = nodes, timeout_seconds
        self._place, self._held = LocalBackend(root), ExitStack()
        self._parts = memory.parts()
        self._manifests = {part.manifest.identity: part.manifest for part in self._parts if part.manifest is not None}
        self._nonce, self._own, self._uid = "", root, -1
        """Of its lease, which says that it is alive; of its own folder there, and who owns that."""
        self._on_disk = self._newest_on_disk()
        self._rollbacks = [*read_rollbacks(self._root).values()]
        self._told: dict[str, tuple[object, _Offer]] = {}
        self._seen = {memory.node}
        self._touched: list[int] = []
        self._heard: object = None
        """What was seen of the others last, and `_since` when that came (monotonic)."""
        self._since = self._beaten = time.monotonic()
        self._settled = False
        """Whether no more nodes are waited for."""
        self._leased: set[Path] = set()
        self._damaged: list[str] = []
        self._goal: _Candidate | None = None
        """What was brought last."""
        self._done = Flushed(None, "")

    def run(self) -> Flushed:
        """Look, bring and commit until there is nothing left to do. Raises: as `flush`."""
        mine = {self._nonce: self._parts}
        if not self._candidates(mine) and not self._is_unsure(mine):
            return self._end([], is_unsure=False)
        with self._held:
            self._begin()
            while True:
                offers = self._look()
                found, is_unsure = self._candidates(offers), self._is_unsure(offers)
                if self._is_over(found, is_unsure):
                    return self._end(found, is_unsure)
                self._watch([sorted(offers), self._touched, [each.there for each in found]])
                whole = next((each for each in found if not each.missing), None)
                if whole is not None and (self._settled or (whole is found[0] and not is_unsure)):
                    self._bring(whole)
                elif self._settled and found:
                    self._give_up(found[0], found[0].missing, "are on no node that is left")
                else:
                    self._pause()

    def _is_over(self, found: Sequence[_Candidate], is_unsure: bool) -> bool:
        if self._goal is not None and self._goal.found.order <= self._on_disk:
            # What is newer was not complete when this was begun.
            return not found or bool(found[0].missing)
        return not found and (self._settled or not is_unsure)

    # ---- what there is -----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Tell the others what this node has."""
        nonce = self._held.enter_context(lease(self._root, [], what="memory flush"))
        if not nonce:
            raise OSError(errno.EACCES, "it cannot be written to", str(self._root))
        step = max(part.step for part in self._parts)
        self._nonce, self._own = nonce, Path(self._place.begin(step_folder(step), f"{nonce}-1"))
        self._held.callback(self._place.abandon, str(self._own))
        self._held.enter_context(holding(self._own))
        self._uid = self._own.lstat().st_uid  # which a server may have mapped
        for identity, manifest in list(self._manifests.items()):
            DISK.write_file(self._own / _manifest_name(identity), manifest.to_json())
        self._tell()

    def _tell(self) -> None:
        held = [
            _Held(step=part.step, identity=part.manifest.identity if part.manifest else "", sizes=dict(part.sizes))
            for part in self._parts
        ]
        offer = _Offer(node=self._memory.node, held=held)
        DISK.replace_file(self._own / _OFFER, seal(offer.model_dump_json().encode()))

    def _look(self) -> dict[str, list[Part]]:
        """Return what each process that is alive has told, by its nonce."""
        alive = look(self._root, wait=False).nonces
        offers = {self._nonce: self._parts}
        touched: list[int] = []
        for name in self._place.catalogue.names():
            parsed = parse_step(name)
            nonce, _, number = parsed.tag.partition("-") if parsed is not None and parsed.kind == "tmp" else ("",) * 3
            if number == "1" and nonce in alive and nonce != self._nonce:
                with contextlib.suppress(OSError, CkptmanError, ValidationError):  # it begins, or ends, or is no flush
                    offer = self._read(nonce, self._root / name)
                    touched.append((self._root / name).lstat().st_mtime_ns)
                    self._seen.add(offer.node)
                    offers[nonce] = [
                        Part(each.step, self._manifests.get(each.identity), each.sizes) for each in offer.held
                    ]
        self._touched = touched
        return offers

    def _read(self, nonce: str, folder: Path) -> _Offer:
        """Return what another process has told. Raises: OSError, CkptmanError, ValidationError."""
        path = folder / _OFFER
        found = path.lstat()
        if found.st_uid != self._uid:
            raise PermissionError(errno.EPERM, "another user has made it", str(path))
        stamp, known = (found.st_ino, found.st_size, found.st_mtime_ns), self._told.get(nonce)
        if known is not None and known[0] == stamp:
            return known[1]
        offer = _Offer.model_validate(parse_versioned(path, unseal(path, read_regular(path, MOST_BYTES))))
        for identity in {each.identity for each in offer.held} - {"", *self._manifests}:
            beside = folder / _manifest_name(identity)
            manifest = parse_manifest(beside, read_regular(beside, MOST_BYTES))
            self._manifests[manifest.identity] = manifest
        self._told[nonce] = stamp, offer
        return offer

    def _candidates(self, offers: Mapping[str, Sequence[Part]]) -> list[_Candidate]:
        """Return the checkpoints in memory that are newer than what is on disk, newest first."""
        candidates = []
        for found in found_in(offers):
            step = found.manifest.step
            draft = self._root / step_folder(step, "tmp", f"copy-{found.manifest.identity[:16]}")
            there = self._in_draft(draft, found.manifest)
            # After the draft: it becomes this at once.
            entry = look_at(self._root / step_folder(step), step)
            if entry.complete:
                self._on_disk = max(self._on_disk, (entry.require_manifest().attempt, step))
            if found.order > self._on_disk and left_by(self._rollbacks, found.manifest) is None:
                candidates.append(_Candidate(found, draft, there))
        return candidates

    def _in_draft(self, draft: Path, manifest: Manifest) -> frozenset[str]:
        try:
            with os.scandir(draft) as items:
                sizes = {item.name: item.stat(follow_symlinks=False).st_size for item in items}
        except FileNotFoundError:
            return frozenset()
        return frozenset(name for name, record in manifest.files.items() if sizes.get(name) == record.bytes)

    def _is_unsure(self, offers: Mapping[str, Sequence[Part]]) -> bool:
        """Return whether somebody has files of a checkpoint of which only a node that has not been heard of can know
        whether it counts."""
        parts = [part for each in offers.values() for part in each]
        known = {part.step for part in parts if part.manifest is not None}
        return any(part.step not in known for part in parts)

    def _newest_on_disk(self) -> tuple[int, int]:
        return attempt_and_step(self._place.list(until=any_will_do))

    # ---- waiting for others ------------------------------------------------------------------------------------

    def _watch(self, heard: object) -> None:
        """Note whether something has come from others since they were looked at last."""
        if heard != self._heard:
            self._heard, self._since = heard, time.monotonic()
        if self._settled:
            return
        if self._nodes is not None and len(self._seen) >= self._nodes:
            self._settled = True
        elif self._idle_seconds > self._timeout_seconds:
            self._settled, self._since = True, time.monotonic()

    @property
    def _idle_seconds(self) -> float:
        return time.monotonic() - self._since

    def _pause(self) -> None:
        time.sleep(max(_LOOK_SECONDS, len(self._told) / _LOOKS_PER_SECOND))

    def _beat(self) -> None:
        """Have the others see that this process is at work."""
        if time.monotonic() - self._beaten > _BEAT_SECONDS:
            self._beaten = time.monotonic()
            os.utime(self._own)

    def _give_up(self, candidate: _Candidate, names: Sequence[str], what: str) -> NoReturn:
        """Raises: NotFoundError, CorruptError."""
        time.sleep(_LINGER_SECONDS)  # in which others, who may have begun later, see what is here
        parts = sorted({name for name in names if name.startswith("__")}) or sorted(names)
        shown = ", ".join(parts[:4]) + (", ..." if len(parts) > 4 else "")
        step = self._on_disk[1]
        instead = f"step {step}, the newest on disk" if step >= 0 else "its start, as there is nothing on disk"
        text = (
            f"step {candidate.found.manifest.step} in memory is not complete: {len(parts)} of its parts {what} "
            f"({shown}). The run goes on from {instead}"
        )
        if self._damaged:
            raise CorruptError(f"{text}. Not what was saved in the memory of this node: {', '.join(self._damaged[:4])}")
        raise NotFoundError(text)

    # ---- bringing ----------------------------------------------------------------------------------------------

    def _bring(self, candidate: _Candidate) -> None:
        """Bring some files of a checkpoint, or commit it when nothing is left."""
        self._goal, is_late = candidate, self._idle_seconds > self._timeout_seconds
        if names := self._share(candidate)[: io_threads()]:
            self._make_draft(candidate)
            with ThreadPoolExecutor(len(names), thread_name_prefix="ckptman-flush") as pool:
                problems = list(pool.map(lambda name: self._bring_file(candidate, name), names))
            self._account(candidate, dict(zip(names, problems)))
        elif candidate.left:
            if is_late:
                self._give_up(candidate, candidate.left, f"have not come for {self._timeout_seconds:g} s")
            self._pause()
        else:
            try:
                self._commit(candidate)
            except BusyError:  # another flush, which commits it; or a run
                if is_late:
                    raise
                self._pause()

    def _share(self, candidate: _Candidate) -> list[str]:
        """Return what this process brings now: of each file one of its holders does, the same by all who reckon.

        When nothing has come for long, everybody brings all that it has.
        """
        holders, files = candidate.found.holders, candidate.found.manifest.files
        is_late = self._idle_seconds > self._timeout_seconds / 4
        mine, load = [], Counter[str]()
        for name in sorted(files, key=lambda each: (-files[each].bytes, each)):
            if having := holders.get(name):
                who = min(having, key=lambda each: (load[each], each))
                load[who] += files[name].bytes
                if name not in candidate.there and (who == self._nonce or (is_late and self._nonce in having)):
                    mine.append(name)
        return mine

    def _make_draft(self, candidate: _Candidate) -> None:
        draft = candidate.draft
        if draft not in self._leased:
            self._held.callback(self._clear, candidate)
            self._held.enter_context(lease(self._root, [draft.name], what="memory flush"))
            self._leased.add(draft)
        with contextlib.suppress(FileExistsError):
            self._place.begin(*draft.name.split(".tmp-"))
        found = draft.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != self._uid:
            raise OSError(errno.EPERM, "something else has the name of a draft: remove it", str(draft))

    def _clear(self, candidate: _Candidate) -> None:
        """Remove a draft that was begun anew when it had just been committed."""
        if candidate.found.order <= self._on_disk and candidate.draft.exists():
            self._place.abandon(str(candidate.draft))

    def _bring_file(self, candidate: _Candidate, name: str) -> str:
        """Move a file to the draft once every byte of it is right and durable. Returns what is wrong with it, or "".

        Raises: OSError of the root.
        """
        from ckptman.storage.io.file_writer import FileWriter  # numpy, which most flushes can do without

        manifest = candidate.found.manifest
        target, record = self._own / name, manifest.files[name]
        digester, memory = BlockDigester(manifest.block_bytes), aligned_memory(STRIDE_BYTES)
        reader = FileReader(self._memory.path_of(manifest.step) / name)
        try:
            with FileWriter(target, record.bytes, flags=os.O_TRUNC) as writer:
                for begin in range(0, record.bytes, STRIDE_BYTES):
                    view = memory[: min(STRIDE_BYTES, record.bytes - begin)]
                    try:
                        count = reader.read([view], begin)
                    except (CorruptError, OSError) as error:
                        return f"{name} cannot be read: {error}"
                    digester.update(view[:count])
                    writer.write(view, begin)
                    self._beat()
                if digester.finish() != record.digest:
                    return f"{name} has other bytes"
                writer.flush(record.bytes)
        finally:
            reader.close()
        with contextlib.suppress(FileNotFoundError):  # the draft was committed just now
            DISK.rename(target, candidate.draft / name)
        return ""

    def _account(self, candidate: _Candidate, problems: Mapping[str, str]) -> None:
        """Count files that were brought, and offer those no more that are not what was saved: others may have them."""
        step, files = candidate.found.manifest.step, candidate.found.manifest.files
        sizes = [files[name].bytes for name, problem in problems.items() if not problem]
        self._done = replace(self._done, files=self._done.files + len(sizes), bytes=self._done.bytes + sum(sizes))
        if bad := {name: problem for name, problem in problems.items() if problem}:
            self._damaged += bad.values()
            self._parts = [
                replace(part, sizes={name: size for name, size in part.sizes.items() if name not in bad})
                if part.step == step
                else part
                for part in self._parts
            ]
            self._tell()

    # ---- the end -----------------------------------------------------------------------------------------------

    def _commit(self, candidate: _Candidate) -> None:
        """Make a draft in which nothing is missing a checkpoint. Raises: BusyError, OSError."""
        manifest = candidate.found.manifest
        held = claim(self._root, manifest.run_id, os.environ.get("SLURM_JOB_ID"))
        try:
            # Who had the claim before may have committed it, or a newer one; or rolled back.
            self._on_disk, self._rollbacks = self._newest_on_disk(), [*read_rollbacks(self._root).values()]
            (still,) = self._candidates({self._nonce: [Part(manifest.step, manifest, {})]}) or (None,)
            if still is None or still.left:
                return
            held.check()
            sequence = 1 + self._place.last_sequence()
            self._place.commit(str(candidate.draft), manifest.model_copy(update={"sequence": sequence}))
            self._done = replace(self._done, committed=manifest.step)
        finally:
            held.release()

    def _end(self, found: Sequence[_Candidate], is_unsure: bool) -> Flushed:
        """Return how it ended, when there is nothing left in memory that is newer than on disk, and complete."""
        if self._manifests:  # whoever committed it may have been killed before that was durable
            DISK.sync_folder(self._root)
        step = self._on_disk[1] if self._on_disk != _NOTHING else None
        nodes = len(self._seen)
        if self._goal is not None:
            why = f"step {step} is on disk, from the memory of {nodes} node{'' if nodes == 1 else 's'}"
            if found:
                why += f"; step {found[0].found.manifest.step}, which is newer, was not complete"
        elif not self._parts:
            why = f"{self._memory.node} holds nothing of it in memory"
        elif is_unsure and not self._manifests:
            why = "what is in memory was not complete when the run ended"
        elif any(left_by(self._rollbacks, each) is not None for each in self._manifests.values()):
            why = "what is in memory is older than the last rollback"
        else:
            why = f"step {step} on disk is the same as in memory, or newer"
        self._done = replace(self._done, step=step, why=why)
        return self._done


def _manifest_name(identity: str) -> str:
    return f"manifest-{identity}.json"

"""One root, and everybody at it at once: a run that saves, prunes that are killed, readers, a copy, and one who pins.

Each takes part in a process of its own. The run commits at the pace of two: two runs in one root would refuse each
other. Torch-free: what is on trial is who may take what away, and when.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ckptman.catalog.backends.local import LocalBackend
from ckptman.catalog.catalog import Catalog, Entry
from ckptman.catalog.pins import pin
from ckptman.catalog.prune import execute, plan_prune
from ckptman.catalog.reader_lease import lease, reading
from ckptman.catalog.writer_lock import claim
from ckptman.errors import CorruptError, NotFoundError
from ckptman.format.paths import step_folder
from ckptman.integrity.folder_check import verify_folder
from ckptman.io.durable_files import DISK
from ckptman.policies.retention_rules import KeepEvery, KeepLast, KeepSteps, RetentionPolicy
from ckptman.transfer.copy import copy_checkpoint
from tests.helpers.faulty_disk import save

EVERY_STEPS = 25
"""Multiples of this are milestones of every prune: none of them may ever go."""
POLICIES: list[RetentionPolicy] = [
    KeepLast(2) | KeepEvery(EVERY_STEPS),
    KeepLast(4) | KeepEvery(EVERY_STEPS) | KeepSteps(7, 77, 777),
    KeepLast(1) | KeepEvery(EVERY_STEPS),
]
CONTENT_BYTES = 20_000
LOOKS = 20
"""How often a restore looks anew where what it chose was gone."""
KILL_SECONDS = 0.7


@dataclass
class Field:
    """Where it takes place, and when it ends (monotonic clock, which processes of a host share)."""

    root: Path
    notes: Path
    end: float
    seed: int
    committed: Any
    """The sequence of the last commit that the run knows to be durable."""

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self.end

    def note(self, who: str, **facts: object) -> None:
        """Write a line down for the judge: one write, so that a kill leaves a whole line or none."""
        with (self.notes / f"{who}-{os.getpid()}.jsonl").open("ab", buffering=0) as file:
            file.write(json.dumps({"who": who, **facts}).encode() + b"\n")


def _saver(field: Field) -> None:
    held = claim(field.root, "torture", None)
    step = 0
    while field.goes_on:
        step += 1
        content = random.Random(step).randbytes(CONTENT_BYTES)
        entry = save(field.root, step, content, tag=held.next_tag())
        field.committed.value = entry.sequence
        field.note("saver", step=step)
        if step % 2 == 0:  # as a training loop does, after a commit
            execute(field.root, plan_prune(field.root, POLICIES[0], wait=False), held.next_tag())
    held.release()


def _pruner(field: Field, number: int) -> None:
    count = 0
    while field.goes_on:
        count += 1
        with contextlib.suppress(NotFoundError):
            plan = plan_prune(field.root, POLICIES[1 + number])
            with lease(field.root, [], what="prune") as nonce:
                done = execute(field.root, plan, f"{nonce}-{count}", jobs=1 + number * 2)
            field.note("pruner", deleted=len(done.deleted), spared=len(done.spared))


def _reader(field: Field, number: int) -> None:
    """Restores the newest, or verifies some other one. With a lease nothing vanishes; without, a restore goes on."""
    dice = random.Random(field.seed + number)
    while field.goes_on:
        before = field.committed.value
        if not before:
            continue
        entries = Catalog(field.root).complete()
        newest = entries[-1].sequence if entries else 0
        field.note("listing", behind=max(0, before - newest))
        if number == 0:
            field.note("restore", looks=_restore_without_lease(field))
        elif entries:
            entry = dice.choice(entries)
            with reading(entry.path, what="torture"):
                field.note("leased", outcome=_read(entry, must_stay=True))


def _restore_without_lease(field: Field) -> int:
    """As `Restorer.best`, for one who may not write to the root: how often it looked; 0: it found nothing good."""
    for look in range(1, LOOKS + 1):
        for entry in reversed(Catalog(field.root).complete()):
            outcome = _read(entry, must_stay=False)
            if outcome == "good":
                return look
            if outcome != "gone":
                return 0
            break
    return 0


def _read(entry: Entry, must_stay: bool) -> str:
    """ "good", "gone" (before it was looked at), or what is wrong: with a lease it must not vanish any more then."""
    try:
        # What there is now is held from now on.
        if must_stay and not (entry.path / "manifest.json").exists():
            return "gone"
        report = verify_folder(entry.path, entry.require_manifest(), threads=1)
    except FileNotFoundError:
        return "it vanished" if must_stay else "gone"
    if report.good:
        return "good"
    if not must_stay and not entry.path.exists():
        return "gone"
    return "; ".join([*report.problems, *report.unread])


def _copier(field: Field) -> None:
    target = field.root.with_name("copies")
    target.mkdir(exist_ok=True)
    place = LocalBackend(target)
    dice = random.Random(field.seed)
    while field.goes_on:
        entries = Catalog(field.root).complete()
        if not entries:
            continue
        entry = dice.choice(entries[-3:])
        try:
            copied = copy_checkpoint(entry, place)
            field.note("copy", outcome="good", path=str(target / entry.path.name), step=entry.step)
            del copied
        except (NotFoundError, FileNotFoundError):
            field.note("copy", outcome="gone")
        except CorruptError as error:
            # It vanished before the copy held it; the copy cannot tell that from files that are missing.
            field.note("copy", outcome="gone" if not entry.path.exists() else str(error))
        execute(target, plan_prune(target, KeepLast(3)), f"copy-{os.urandom(4).hex()}")


def _pinner(field: Field) -> None:
    dice = random.Random(field.seed)
    while field.goes_on:
        time.sleep(0.05)
        entries = Catalog(field.root).complete()
        if not entries:
            continue
        entry = dice.choice(entries)
        try:
            pin(entry.path, "torture", by="torture", time_seconds=1.0, disk=DISK)
        except OSError:
            continue  # it went first
        field.note("pin", step=entry.step)
        if len(entries) > 60:
            return


def _run(part: Callable[..., None], field: Field, *rest: int) -> None:
    os.fsync = lambda fd: None  # type: ignore[assignment] # nobody pulls the plug here, and the pace is what hurts
    try:
        part(field, *rest)
    except BaseException as error:
        field.note(
            "failure", part=part.__name__, error=f"{type(error).__name__}: {error}", trace=traceback.format_exc()
        )
        raise


def torture(folder: Path, seconds: float, seed: int) -> Counter[str]:
    """Have all of them at a root below `folder`. Returns what was counted. Raises: AssertionError (a promise broke)."""
    context = multiprocessing.get_context("fork")
    root, notes = folder / "root", folder / "notes"
    root.mkdir()
    notes.mkdir()
    field = Field(root, notes, time.monotonic() + seconds, seed, context.Value("q", 0))

    def start(part: Callable[..., None], *rest: int) -> BaseProcess:
        process = context.Process(target=_run, args=(part, field, *rest))
        process.start()
        return process

    steady = [start(_saver), start(_reader, 0), start(_reader, 1), start(_copier), start(_pinner), start(_pruner, 0)]
    victim, kills, dice = start(_pruner, 1), 0, random.Random(seed)
    while field.goes_on:
        time.sleep(min(dice.uniform(0, 2 * KILL_SECONDS), max(0.0, field.end - time.monotonic())))
        # Interrupted anywhere, a prune can be run again.
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        kills += 1
        victim = start(_pruner, 1)
    for process in (*steady, victim):
        process.join(120)
        assert not process.is_alive(), "somebody hangs"
    return _judge(field, kills)


def _judge(field: Field, kills: int) -> Counter[str]:
    facts = [json.loads(line) for path in sorted(field.notes.iterdir()) for line in path.read_bytes().splitlines()]
    failures = [fact for fact in facts if fact["who"] == "failure"]
    assert not failures, f"{failures[0]['part']}: {failures[0]['trace']}"
    execute(field.root, plan_prune(field.root, POLICIES[2]), "0123abcd-1")
    there = {entry.step: entry for entry in Catalog(field.root).scan()}
    saved = {fact["step"] for fact in facts if fact["who"] == "saver"}
    pinned = {fact["step"] for fact in facts if fact["who"] == "pin"}
    kept = {step for step in saved if step % EVERY_STEPS == 0} | pinned | {max(saved)}
    lost = sorted(kept - there.keys())
    assert not lost, f"kept checkpoints are lost: {lost}"
    assert all(entry.complete for entry in there.values()), [entry.problem for entry in there.values()]
    for entry in there.values():
        assert verify_folder(entry.path, entry.require_manifest(), threads=1).good, entry.path
    assert not [
        path for path in field.root.iterdir() if path.name not in {step_folder(step) for step in there} | {".ckptman"}
    ]
    assert all(fact["behind"] == 0 for fact in facts if fact["who"] == "listing"), "a listing missed the newest"
    assert all(fact["looks"] > 0 for fact in facts if fact["who"] == "restore"), "a restore found nothing good"
    outcomes = Counter(fact["outcome"] for fact in facts if fact["who"] in ("leased", "copy"))
    assert set(outcomes) <= {"good", "gone"}, outcomes
    return Counter(
        {
            "commits": len(saved),
            "deleted": sum(fact["deleted"] for fact in facts if fact["who"] == "pruner"),
            "spared": sum(fact["spared"] for fact in facts if fact["who"] == "pruner"),
            "prunes": sum(fact["who"] == "pruner" for fact in facts),
            "kills": kills,
            "restores": sum(fact["who"] == "restore" for fact in facts),
            "restores that looked again": sum(fact["who"] == "restore" and fact["looks"] > 1 for fact in facts),
            "reads with a lease": sum(fact["who"] == "leased" for fact in facts),
            "copies": sum(fact["who"] == "copy" and fact["outcome"] == "good" for fact in facts),
            "pins": len(pinned),
        }
    )

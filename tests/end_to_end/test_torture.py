"""Everybody at one root at once: nothing that is to be kept is lost, and nothing vanishes under who reads it.

A run that saves, prunes that are killed, readers, a copy, and one who pins: each in a process of its own. Two runs in
one root would refuse each other. Torch-free: what is on trial is who may take what away, and when.
"""

import contextlib
import json
import multiprocessing
import os
import random
import signal
import time
import traceback
from collections import Counter

import pytest

from ckptman.errors import CorruptError, NotFoundError
from ckptman.policies.retention_rules import KeepEvery, KeepLast, KeepSteps
from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.catalog.pins import pin
from ckptman.storage.catalog.prune import execute, plan_prune
from ckptman.storage.catalog.reader_lease import GoneError, lease, reading
from ckptman.storage.catalog.writer_lock import claim
from ckptman.storage.format.paths import step_folder
from ckptman.storage.integrity.folder_check import verify_folder
from ckptman.storage.transfer.copy import copy_checkpoint
from tests.helpers.faulty_disk import save

EVERY_STEPS = 25
"""Multiples of this are milestones of every prune: none of them may ever go."""
POLICIES = [
    KeepLast(2) | KeepEvery(EVERY_STEPS),
    KeepLast(4) | KeepEvery(EVERY_STEPS) | KeepSteps(7, 77, 777),
    KeepLast(1) | KeepEvery(EVERY_STEPS),
]
CONTENT_BYTES = 20_000
LOOKS = 20
"""How often a restore looks again when what it chose was gone."""
KILL_SECONDS = 0.7
LEAST = {"saver": 50, "pruner": 40, "listing": 40, "restore": 20, "leased": 20, "copy": 20, "pin": 20}
"""How often each has to have done its part: less would prove nothing."""


class Field:
    """Where it takes place. Those who take part do so until it is `over`."""

    def __init__(self, folder, seed):
        context = multiprocessing.get_context("fork")
        self.root, self.notes, self.seed = folder / "root", folder / "notes", seed
        self.over, self.process = context.Event(), context.Process
        self.committed = context.Value("q", 0)
        """The sequence of the last commit that the run knows to be durable."""
        self.root.mkdir()
        self.notes.mkdir()

    def note(self, who, **facts):
        """Write a line down for the judge: one write, so that a kill leaves a whole line or none."""
        with (self.notes / f"{who}-{os.getpid()}.jsonl").open("ab", buffering=0) as file:
            file.write(json.dumps({"who": who, **facts}).encode() + b"\n")

    def facts(self):
        lines = [line for path in sorted(self.notes.iterdir()) for line in path.read_bytes().splitlines()]
        return [json.loads(line) for line in lines]

    def start(self, part, *rest):
        process = self.process(target=self._run, args=(part, *rest))
        process.start()
        return process

    def _run(self, part, *rest):
        os.fsync = lambda fd: None  # nobody pulls the plug here, and the pace is what hurts
        try:
            part(self, *rest)
        except BaseException:
            self.note("failure", trace=traceback.format_exc())
            raise


def saver(field):
    held, step = claim(field.root, "torture", None), 0
    while not field.over.is_set():
        step += 1
        entry = save(field.root, step, random.Random(step).randbytes(CONTENT_BYTES), tag=held.next_tag())
        field.committed.value = entry.sequence
        field.note("saver", step=step)
        if step % 2 == 0:  # as a training loop does, after a commit
            execute(field.root, plan_prune(field.root, POLICIES[0], wait=False), held.next_tag())
    held.release()


def pruner(field, number):
    count = 0
    while not field.over.is_set():
        count += 1
        with contextlib.suppress(NotFoundError):
            plan = plan_prune(field.root, POLICIES[1 + number])
            with lease(field.root, [], what="prune") as nonce:
                execute(field.root, plan, f"{nonce}-{count}", jobs=1 + number * 2)
            field.note("pruner")


def restorer(field):
    """As `Restorer.best`, for one who may not write to the root, and has no lease: it looks again."""
    while not field.over.is_set():
        if _lists(field):
            outcome = "gone"
            for _ in range(LOOKS):
                entries = Catalog(field.root).complete()
                outcome = _read(entries[-1], must_stay=False) if entries else "nothing is there"
                if outcome != "gone":
                    break
            field.note("restore", outcome=outcome)


def reader(field):
    """With a lease nothing vanishes, whichever it is."""
    dice = random.Random(field.seed)
    while not field.over.is_set():
        if entries := _lists(field):
            entry = dice.choice(entries)
            with contextlib.suppress(GoneError), reading(entry.path, what="torture"):
                field.note("leased", outcome=_read(entry, must_stay=True))


def _lists(field):
    """What is there, once there is something: no listing misses the newest."""
    before = field.committed.value
    entries = Catalog(field.root).complete() if before else []
    if before:
        field.note("listing", behind=max(0, before - max((entry.sequence for entry in entries), default=0)))
    return entries


def _read(entry, must_stay):
    """ "good", "gone" (before it was looked at), or what is wrong: with a lease it must not vanish any more then."""
    try:
        # What there is now is held from now on.
        if must_stay and not (entry.path / "manifest.json").exists():
            return "gone"
        report = verify_folder(entry.path, entry.require_manifest(), threads=1)
    except FileNotFoundError:
        return "it vanished" if must_stay else "gone"
    if not report.good and not must_stay and not entry.path.exists():
        return "gone"
    return "good" if report.good else "; ".join([*report.problems, *report.unread])


def copier(field):
    target, dice = field.root.with_name("copies"), random.Random(field.seed)
    target.mkdir()
    while not field.over.is_set():
        entries = Catalog(field.root).complete()
        if not entries:
            continue
        entry, outcome = dice.choice(entries[-3:]), "good"
        try:
            copy_checkpoint(entry, LocalBackend(target))
        except (NotFoundError, FileNotFoundError):
            outcome = "gone"
        except CorruptError as error:
            # It vanished before the copy held it; the copy cannot tell that from files that are missing.
            outcome = "gone" if not entry.path.exists() else str(error)
        field.note("copy", outcome=outcome)
        execute(target, plan_prune(target, KeepLast(3)), f"copy-{os.urandom(4).hex()}")


def pinner(field):
    dice = random.Random(field.seed)
    while not field.over.wait(0.05):
        entries = Catalog(field.root).complete()
        if 0 < len(entries) <= 60:
            entry = dice.choice(entries)
            with contextlib.suppress(OSError):  # it went first
                pin(entry.path, "torture", by="torture", time_seconds=1.0)
                field.note("pin", step=entry.step)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kills",
    [15, pytest.param(1000, marks=[pytest.mark.campaign, pytest.mark.timeout(3600)])],
    ids=["short", "campaign"],
)
def test_everybody_at_once(tmp_path, kills):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    field, dice = Field(tmp_path, seed), random.Random(seed)
    steady = [field.start(part) for part in (saver, restorer, reader, copier, pinner)]
    steady.append(field.start(pruner, 0))
    counts = Counter()
    while not counts["failure"] and any(counts[who] < least for who, least in {**LEAST, "kill": kills}.items()):
        # Interrupted anywhere, a prune can be run again.
        victim = field.start(pruner, 1)
        time.sleep(dice.uniform(0, 2 * KILL_SECONDS))
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        field.note("kill")
        counts = Counter(fact["who"] for fact in field.facts())
    field.over.set()
    for process in steady:
        process.join(120)
        assert not process.is_alive(), "somebody hangs"
    print(dict(counts))
    judge(field.root, field.facts())


def judge(root, facts):
    told = {who: [fact for fact in facts if fact["who"] == who] for who in (*LEAST, "failure")}
    assert not told["failure"], told["failure"][0]["trace"]
    execute(root, plan_prune(root, POLICIES[2]), "0123abcd-1")
    there = {entry.step: entry for entry in Catalog(root).scan()}
    saved = {fact["step"] for fact in told["saver"]}
    kept = {step for step in saved if step % EVERY_STEPS == 0} | {fact["step"] for fact in told["pin"]} | {max(saved)}
    assert not kept - there.keys(), "kept checkpoints are lost"
    for entry in there.values():
        assert entry.complete, entry.problem
        assert verify_folder(entry.path, entry.require_manifest(), threads=1).good, entry.path
    assert {path.name for path in root.iterdir()} == {".ckptman", *map(step_folder, there)}
    assert all(fact["behind"] == 0 for fact in told["listing"]), "a listing missed the newest"
    assert {fact["outcome"] for fact in told["restore"]} == {"good"}
    assert {fact["outcome"] for fact in told["leased"] + told["copy"]} <= {"good", "gone"}
    assert len(there) < len(saved), "nothing was deleted"

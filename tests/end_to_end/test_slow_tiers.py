"""Tiers that are slow, or hang: no run is held up by them, at its start, while it saves or at its end.

A tier hangs when every call for a path in it blocks, in this process and in its children (`HANGS`).
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import psutil
import pytest
import torch

import ckptman
from ckptman.cli.app import main
from ckptman.errors import RootError
from ckptman.policies.tiers import Tier
from ckptman.runtime.journal import Journal, read_journal
from ckptman.runtime.outcome import read_outcome
from ckptman.session import drain_process as draining
from ckptman.session import restorer as restore
from ckptman.session.drain_process import Drainer
from ckptman.storage.catalog import reader_lease as lease_module
from ckptman.storage.catalog.backends import local as answering
from ckptman.storage.catalog.backends.local import answers
from ckptman.storage.catalog.backends.object_store import ObjectBackend
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.catalog.tiers import read_tiers, write_tiers
from ckptman.storage.format.paths import outcome_path
from ckptman.storage.transfer.copy import copy_checkpoint
from ckptman.storage.transfer.drain import plan_drain
from tests.end_to_end.test_tiers import events, run, steps
from tests.helpers.ranks import start_ranks
from tests.storage.catalog.test_tiers import drain, root

__all__ = ["root"]

HANGS = """
import builtins, io, os, threading

_stat = os.stat

def hanging(function):
    def call(*args, **kwargs):
        far = os.environ["HANGS"]
        paths = [os.fspath(each) for each in args[:2] if isinstance(each, (str, os.PathLike))]
        if any(path == far or path.startswith(far + "/") for path in paths):
            try:
                _stat(far + ".hangs")
            except FileNotFoundError:
                pass
            else:
                threading.Event().wait()
        return function(*args, **kwargs)
    return call

NAMES = "stat lstat open scandir listdir mkdir rename replace unlink rmdir utime statvfs readlink link access".split()
for name in NAMES:
    setattr(os, name, hanging(getattr(os, name)))
io.open = builtins.open = hanging(io.open)
"""
"""Makes a tier hang, from the moment on when there is a file of its name with `.hangs` after it."""

TEST = """#!/bin/sh
case "$2" in "$HANGS"*) while [ -e "$HANGS.hangs" ]; do sleep 0.1; done;; esac
[ "$1" "$2" ]
"""


def hang_from_now_on(far):
    far.with_name(far.name + ".hangs").touch()


# ---- drains that hang ------------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(draining, "STUCK_SECONDS", 0.3)
    monkeypatch.setattr(draining, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(draining, "END_SECONDS", 0.5)


@pytest.fixture
def drainer(tmp_path):
    """One by itself, with a journal."""
    journal = Journal(tmp_path / "journal.jsonl")
    journal.record("begins")
    yield Drainer(tmp_path / "run", journal)
    journal.close()


def hang_instead(folder, monkeypatch, first=""):
    """Have drains do nothing, for ever. What waits until one does that, and gives its pid."""
    os.mkfifo(folder / "there")
    script = folder / "hangs.sh"
    script.write_text(f'#!/bin/sh\n{first}\necho $$ > "{folder}/there"\nexec sleep 600\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return lambda: int((folder / "there").read_text())


def causes(folder):
    return [each["cause"] for each in read_journal(folder / "journal.jsonl")[0] if each["event"] == "drain_failed"]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("first", ["", "trap '' TERM"], ids=["", "deaf"])
@pytest.mark.parametrize("finish", [True, False])
def test_a_drain_that_hangs_is_ended_at_the_end_of_a_run(drainer, first, finish, tmp_path, monkeypatch):
    await_hang = hang_instead(tmp_path, monkeypatch, first)
    drainer.poke()
    pid = await_hang()
    if finish:
        drainer.poke()  # what was saved meanwhile is not waited for either
        with pytest.warns(RuntimeWarning, match=r"no save: the drain at the end did nothing for 0\.3 s.*goes on with"):
            drainer.close(finish=True)
        (cause,) = causes(tmp_path)
        assert cause.startswith("the drain at the end did nothing for 0.3 s, and was ended. ckptman drain ")
        drainer.close(finish=True)  # nothing is left to wait for
    else:
        drainer.close(finish=False)
        assert causes(tmp_path) == []
    assert not psutil.pid_exists(pid)


NEVER = float("inf")


class Undead:
    """A process on a clock of its own that never ends, whatever it is sent, or ends when its work is done.

    `moves`: when it does something, in seconds.
    """

    pid = 4711

    def __init__(self, moves, ends_at):
        self.now, self.moves, self.ends_at = 0.0, moves, ends_at
        self.returncode = None
        self.sent = []

    def work_done(self, pid):
        return sum(moment <= self.now for moment in self.moves)

    def monotonic(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds
        if self.now < self.ends_at:
            raise subprocess.TimeoutExpired("drain", seconds)
        self.returncode = 0

    def poll(self):
        return self.returncode

    def terminate(self):
        self.sent.append("TERM")

    def kill(self):
        self.sent.append("KILL")


MOVES = [590.0 * number for number in range(100)]


@pytest.mark.parametrize(("moves", "ends_at"), [([], NEVER), (MOVES, NEVER), (MOVES, MOVES[-1] + 500)])
def test_a_drain_is_waited_for_as_long_as_it_moves_something(moves, ends_at, drainer, tmp_path, monkeypatch):
    """One that then cannot be killed is left to itself."""
    process = Undead(moves, ends_at)
    monkeypatch.setattr(draining, "time", process)
    monkeypatch.setattr(draining, "_work_done", process.work_done)
    drainer._process, drainer._again = process, False
    drainer._outputs = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    warned = pytest.warns(RuntimeWarning, match="did nothing for 600 s")
    with warned if ends_at == NEVER else contextlib.nullcontext():
        drainer.close(finish=True)
    assert process.sent == (["TERM", "KILL"] if ends_at == NEVER else [])
    assert len(causes(tmp_path)) == (ends_at == NEVER)
    most = draining.STUCK_SECONDS + 2 * draining.LOOK_SECONDS + 2 * draining.END_SECONDS
    assert process.now <= max(moves, default=0.0) + most


def test_what_goes_over_a_network_is_work_too():
    """No call that reads or writes a file, as when an object store is read back."""
    program = (
        "import socket\n"
        "here, there = socket.socketpair()\n"
        "print('begins', flush=True)\n"
        "while True: here.send(bytes(1000)); there.recv(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "begins\n"
        before = draining._work_done(child.pid)
        while (now := draining._work_done(child.pid)) == before:
            time.sleep(0.02)
        assert now[0] == before[0]
        child.kill()


def test_a_drain_that_cannot_be_started_ends_no_run(drainer, tmp_path, monkeypatch):
    def full():
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(draining.tempfile, "TemporaryFile", full)
        with pytest.warns(RuntimeWarning, match="no drain could be started"):
            drainer.poke()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.warns(RuntimeWarning, match="no drain could be started"):
        drainer.poke()
    drainer.close(finish=True)
    assert len(causes(tmp_path)) == 2


def test_what_an_attempt_before_left_is_copied_where_this_one_saves_nothing(drainer, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    drainer.close(finish=False)
    assert causes(tmp_path) == [], "a run that is started again does that"
    drainer.close(finish=True)  # with a warning, which is an error here and keeps no rank from the others
    assert causes(tmp_path) == ["it ended with 1"]
    drainer.poke()
    drainer.close(finish=True)
    assert causes(tmp_path) == ["it ended with 1"] * 2


# ---- a tier that hangs while a run is at work ------------------------------------------------------------------------


def run_while_a_tier_hangs(root, far, folder, until, hang_at=0):
    """A run whose tier hangs from a step on, if it does not already. Where it began, and what it warned of."""
    os.environ.update(HANGS=far, PYTHONPATH=folder, PATH=f"{folder}:{os.environ['PATH']}")
    exec(HANGS, {})
    draining.STUCK_SECONDS, draining.LOOK_SECONDS, draining.END_SECONDS = 1.0, 0.1, 1.0
    answering.ANSWER_SECONDS = lease_module._END_SECONDS = 0.3
    state = {"count": {"n": torch.zeros(4)}}
    warnings.simplefilter("always")
    with (
        warnings.catch_warnings(record=True) as warned,
        ckptman.Checkpointer(
            root, state, save_policy=ckptman.EverySteps(10), tiers=[ckptman.Tier(far)], deadline=None, watchdog=60.0
        ) as checkpointer,
    ):
        start = checkpointer.restore()
        for step in range(start + 1, until + 1):
            if step == hang_at:
                hang_from_now_on(Path(far))
            state["count"]["n"] += 1
            checkpointer.step(step)
    return start, [str(each.message) for each in warned]


@pytest.fixture
def far(tmp_path):
    """A tier with steps 10 and 20, and what makes it hang."""
    (tmp_path / "sitecustomize.py").write_text(HANGS)
    (tmp_path / "test").write_text(TEST)
    (tmp_path / "test").chmod(0o755)
    run(str(tmp_path / "run"), [], 20)
    drain(tmp_path / "run", Tier(tmp_path / "far"))
    yield tmp_path / "far"
    (tmp_path / "far.hangs").unlink(missing_ok=True)  # who is still asking goes home


@pytest.mark.slow
def test_a_tier_that_hangs_holds_no_run_up(far, tmp_path):
    """Not even one that went on from a checkpoint of that tier, and holds it; and not the start of the next."""
    root = tmp_path / "run"
    shutil.rmtree(root)
    with start_ranks(2, run_while_a_tier_hangs, str(root), str(far), str(tmp_path), 60, 25) as world:
        (start, warned), _ = world.results()
        assert world.join() == [0, 0]
    assert start == 20
    assert steps(root) == [30, 40, 50, 60]
    outcome = read_outcome(outcome_path(root))
    assert (outcome.state, outcome.exit_code) == ("finished", 0)
    (failed,) = events(root, "drain_failed")
    assert failed["cause"].startswith("the drain at the end did nothing for 1 s, and was ended. ")
    assert [each for each in warned if failed["cause"] in each] == warned

    shutil.rmtree(root / "step-0000000060")
    with start_ranks(1, run_while_a_tier_hangs, str(root), str(far), str(tmp_path), 70) as world:
        ((start, warned),) = world.results()
        assert world.join() == [0]
    assert start == 50
    away = f"{far} does not answer within 0.3 s: check the mount"
    assert f"the tier {far} cannot be looked at, and what it has is not restored: {away}" in warned
    assert read_outcome(outcome_path(root)).state == "finished"
    assert len(events(root, "drain_failed")) > 1
    far.with_name("far.hangs").unlink()
    assert main(["drain", str(root)]) == 0
    assert steps(far) == [10, 20, 30, 40, 50, 60, 70]


# ---- who looks at a tier that hangs ----------------------------------------------------------------------------------


@pytest.fixture
def silent(tmp_path, monkeypatch):
    """A folder of which every question hangs, once it is told to."""
    (tmp_path / "ask").write_text('#!/bin/sh\n[ ! -e "$1.hangs" ] || exec sleep 600\n')
    (tmp_path / "ask").chmod(0o755)
    monkeypatch.setattr(answering, "_ASK", (str(tmp_path / "ask"),))
    monkeypatch.setattr(answering, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(answering, "_silent", {})
    return tmp_path / "silent"


def test_who_was_silent_is_not_asked_again_for_a_while(silent, monkeypatch):
    assert answers(silent), "there is none, and that is an answer"
    hang_from_now_on(silent)
    assert not answers(silent)
    silent.with_name("silent.hangs").unlink()
    assert not answers(silent)
    monkeypatch.setattr(answering, "_SILENT_SECONDS", 0.0)
    assert answers(silent)
    monkeypatch.setattr(answering, "_ASK", (f"{silent}/no such command",))
    assert answers(silent), "where nobody can ask, who looks finds out"


def test_a_new_tier_that_hangs_is_an_error(silent, root):
    hang_from_now_on(silent)
    with pytest.raises(RootError, match=r"silent does not answer within 0\.2 s: check the mount"):
        write_tiers(root, [Tier(silent)])
    assert read_tiers(root) == ()


def test_a_tier_that_hangs_keeps_no_other_from_being_filled(silent, root, capsys):
    far = root.parent / "far"
    write_tiers(root, [Tier(silent, every=4), Tier(far)])
    hang_from_now_on(silent)
    plan = plan_drain(root, read_tiers(root))
    assert [each.trouble for each in plan.troubles] == [f"{silent} does not answer within 0.2 s: check the mount"]
    assert main(["drain", str(root)]) == 10
    assert "does not answer" in capsys.readouterr().err
    assert steps(far) == steps(root)
    assert main(["prune", str(root), "--keep-last", "1"]) == 0
    assert steps(root) == [40, 80], "those that it would take"
    assert main(["rollback", str(root), "--to-step", "40"]) == 10


def test_nothing_is_started_over_where_the_only_tier_hangs(silent, root):
    write_tiers(root, [Tier(silent)])
    hang_from_now_on(silent)
    for step in steps(root):
        shutil.rmtree(root / f"step-{step:010d}")
    for _ in range(2):
        with pytest.raises(RootError, match="does not answer"):
            run(str(root), [ckptman.Tier(silent)], 10)
        shutil.rmtree(root, ignore_errors=True)


# ---- a fetch that takes long -----------------------------------------------------------------------------------------


class Looked:
    """The meter of a fetch: something has moved at each of the first looks, and nothing at as many after them."""

    phase, looks = "copying", 0

    def __init__(self):
        self.looked_enough = threading.Event()

    @property
    def done_bytes(self):
        self.looks += 1
        if self.looks == 10:
            self.looked_enough.set()
        return min(self.looks, 5)


@pytest.mark.parametrize("comes", [True, False])
def test_a_fetch_shows_signs_of_life_as_long_as_bytes_move(comes, tmp_path, monkeypatch):
    """So it may take longer than a start, and one that hangs is noticed."""
    run(tmp_path / "first", [], 20)
    place, meter, signs = ObjectBackend(f"memory://{tmp_path.name}"), Looked(), []
    copy_checkpoint(Catalog(tmp_path / "first").entry(20), place)
    run_id = place.look()[0].require_manifest().run_id  # nobody else may go on from it

    def fetch(entry, root, options, source):
        assert meter.looked_enough.wait(60)
        if not comes:
            raise RootError(5, "nothing came any more")
        return copy_checkpoint(entry, root, source=source)

    monkeypatch.setattr(restore, "copy_checkpoint", fetch)
    monkeypatch.setattr(restore, "Meter", lambda: meter)
    monkeypatch.setattr(restore, "_FETCH_LOOK_SECONDS", 0.01)
    state, options = {"count": {"n": torch.zeros(4)}}, {"deadline": None, "run_id": run_id}
    told = contextlib.nullcontext() if comes else pytest.raises(RootError, match="nothing came any more")
    with told, ckptman.Checkpointer(tmp_path / "run", state, tiers=[Tier(place.url)], **options) as checkpointer:
        beat = lambda doing, step: signs.append((meter.looks, doing))  # noqa: E731
        monkeypatch.setattr(checkpointer._watchdog, "beat", beat)
        assert checkpointer.restore() == 20
    assert [each for each in signs if 0 < each[0] < 10] == [(look, "restore") for look in range(1, 6)]
    assert state["count"]["n"].tolist() == [20 if comes else 0] * 4

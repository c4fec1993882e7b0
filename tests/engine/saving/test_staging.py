"""Private copies in host memory: slots that are used again, what is copied later, and what happens without memory."""

import subprocess
import sys
import threading
import warnings
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ckptman
from ckptman.engine.comm.control_group import Channel
from ckptman.engine.saving import staging, writer
from ckptman.engine.saving.staging import RESERVE_BYTES, Slot, Stager
from ckptman.engine.saving.write_plan import plan_save
from ckptman.engine.saving.writer import CheckpointWriter, Content
from ckptman.engine.state.snapshot import snapshot
from ckptman.runtime.journal import read_journal
from ckptman.storage.format.paths import step_folder
from tests.engine.dcp.test_values import bits, noise, shapes_and_views
from tests.helpers.ranks import run_ranks

WAIT = 20.0
"""Seconds after which a test gives up on another thread."""


def file_of(state):
    shot = snapshot(state, 0)
    file = plan_save(shot, Channel(WAIT))
    return file, file.memory(shot)


def differing(staged, file, expected):
    """The names of pieces whose private copy is not what is expected."""
    wrong = []
    for piece, place, tensor in zip(file.pieces, file.places, expected):
        data = bytes(bits(tensor).numpy())
        if bytes(staged.slot.memory[place.payload : place.payload + len(data)]) != data:
            wrong.append(piece.name)
    return wrong


def contents():
    tensors = {name: each for name, each in shapes_and_views().items() if not name.startswith("expanded")}
    tensors |= {"large": noise(torch.float32, 1031, 257), "fp8": noise(torch.float8_e4m3fn, 9, 5)}
    return {"x": tensors | {"tall": noise(torch.float32, 1031, 300).T}}


@contextmanager
def stager_of(may_take=lambda size: True):
    stager = Stager(SimpleNamespace(idle=False))
    stager._has_room = lambda file: may_take(file.end)
    yield stager
    stager.close()


@contextmanager
def behind(work):
    """Do `work` in another thread, which has to end by the end of the block."""
    done, errors = threading.Event(), []

    def run():
        try:
            work()
        except BaseException as error:
            errors.append(error)
        done.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield done
    assert done.wait(WAIT), "it waits for ever"
    assert errors == []


# ---- slots -----------------------------------------------------------------------------------------------------------


def test_a_private_copy_is_the_file_and_does_not_change_with_the_state():
    file, memory = file_of(contents())
    before = [tensor.detach().clone() for tensor in memory]
    with stager_of() as stager:
        staged = stager.stage(file, memory)
        assert differing(staged, file, before) == []
        for tensor in memory:
            if not tensor.is_conj() and 0 not in tensor.stride():
                tensor.copy_(torch.zeros_like(tensor))
        assert differing(staged, file, before) == []
        for start, data in file.literals:
            assert bytes(staged.slot.memory[start : start + len(data)]) == data
        assert len(staged.slot.memory) == file.end
        assert file.end % 4096 == 0


def test_a_slot_that_is_free_is_used_again_and_filled_anew():
    tensor = torch.zeros(300_000)
    file, memory = file_of({"x": {"w": tensor}})
    asked = []
    with stager_of(lambda size: not asked.append(size)) as stager:
        stager.prepare(file, memory)
        stager.wait()
        slots = set()
        for step in range(1, 5):
            tensor.fill_(step)
            staged = stager.stage(file, memory)
            slots.add(id(staged.slot))
            assert differing(staged, file, [torch.full((300_000,), float(step))]) == []
            staged.release()
        assert len(slots) == 1
        assert stager.held_bytes == file.end
    assert asked == [], "nobody asks for memory that is not needed"


def test_a_second_slot_is_made_only_when_the_first_is_busy_and_there_is_never_a_third():
    tensor = torch.zeros(300_000)
    file, memory = file_of({"x": {"w": tensor}})
    asked = []
    with stager_of(lambda size: not asked.append(size)) as stager:
        first = stager.stage(file, memory)
        tensor.fill_(1)
        second = stager.stage(file, memory)
        assert asked == [file.end]
        assert first.slot is not second.slot
        assert stager.held_bytes == 2 * file.end
        tensor.fill_(2)
        third = []
        with behind(lambda: third.append(stager.stage(file, memory))) as done:
            assert not done.wait(0.2)
            assert differing(first, file, [torch.full((300_000,), 0.0)]) == []
            first.release()
        assert third[0].slot is first.slot
        assert differing(second, file, [torch.full((300_000,), 1.0)]) == []
        assert differing(third[0], file, [torch.full((300_000,), 2.0)]) == []
    assert asked == [file.end]


@pytest.mark.parametrize("said_to_be_there", [False, True])
def test_without_memory_for_a_second_slot_a_save_waits_for_the_first(said_to_be_there):
    file, memory = file_of({"x": {"w": torch.zeros(1000)}})
    with stager_of(lambda size: said_to_be_there) as stager:
        first, second = stager.stage(file, memory), []
        with (
            mock.patch.object(staging, "_allocate", side_effect=MemoryError("none left")),
            behind(lambda: second.append(stager.stage(file, memory))) as done,
        ):
            assert not done.wait(0.1)
            first.release()
        assert second[0].slot is first.slot
        assert stager.held_bytes == file.end


def test_a_save_takes_the_slot_that_is_free_first():
    file, memory = file_of({"x": {"w": torch.zeros(1000)}})
    with stager_of() as stager:
        one = stager.stage(file, memory)
        two = stager.stage(file, memory)
        one.release()
        three = stager.stage(file, memory)  # the order in which they are written is two, three
        with behind(lambda: stager.stage(file, memory)) as done:
            two.release()
            in_time = done.wait(1)
            three.release()
        assert in_time


def test_a_save_waits_for_whichever_slot_comes_first(monkeypatch):
    """One that is given back, or one that is being made."""
    file, memory = file_of({"x": {"w": torch.zeros(1000)}})
    allocate, may_allocate, asked = staging._allocate, threading.Event(), threading.Event()

    def slow(size, path):
        asked.set()
        assert may_allocate.wait(WAIT)
        return allocate(size, path)

    with stager_of() as stager:
        first, second, third = stager.stage(file, memory), [], []
        monkeypatch.setattr(staging, "_allocate", slow)
        with behind(lambda: second.append(stager.stage(file, memory))) as done:
            assert asked.wait(WAIT)
            assert not done.is_set()
            first.release()
        assert second[0].slot is first.slot
        with behind(lambda: third.append(stager.stage(file, memory))):
            may_allocate.set()
        assert third[0].slot is not first.slot
        assert stager.held_bytes == 2 * file.end


def test_whoever_is_interrupted_while_the_first_slot_is_made_waits_for_it_again(monkeypatch):
    file, memory = file_of({"x": {"w": torch.zeros(1000)}})
    may_fail = threading.Event()

    def fail(size, path):
        assert may_fail.wait(WAIT)
        raise MemoryError("none left")

    monkeypatch.setattr(staging, "_allocate", fail)
    with stager_of() as stager:
        stager.prepare(file, memory)
        interrupted = mock.patch.object(stager._making, "wait", side_effect=KeyboardInterrupt)
        with interrupted, pytest.raises(KeyboardInterrupt):
            stager.wait()
        may_fail.set()
        for _ in range(2):
            with pytest.raises(MemoryError, match="none left"):
                stager.wait()


def test_a_slot_that_is_made_for_another_file_by_then_is_given_up(monkeypatch):
    file, memory = file_of({"x": {"w": torch.zeros(1000)}})
    other, others = file_of({"x": {"w": torch.ones(5000)}})
    begin = staging._begin

    def interrupted(*arguments):
        begin(*arguments).wait()
        raise KeyboardInterrupt

    with stager_of() as stager:
        monkeypatch.setattr(staging, "_begin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stager.prepare(file, memory)
        monkeypatch.setattr(staging, "_begin", begin)
        staged = stager.stage(other, others)
        assert differing(staged, other, others) == []
        staged.release()


def test_another_file_takes_the_place_of_the_slots():
    file, memory = file_of({"x": {"w": torch.zeros(1000)}})
    other, others = file_of({"x": {"w": torch.ones(5000), "v": torch.ones(3)}})
    with stager_of() as stager:
        first, second = stager.stage(file, memory), stager.stage(file, memory)
        with behind(lambda: stager.prepare(other, others)) as done:
            first.release()
            assert not done.wait(0.2), "the second is still being written"
            second.release()
        stager.wait()
        assert stager.held_bytes == other.end
        assert differing(stager.stage(other, others), other, others) == []


@pytest.mark.parametrize(
    "state",
    [
        {"value": 5},
        {"x": {"empty": torch.empty(0, 3), "value": 5}},
        {"x": {"fp4": noise(torch.uint8, 8, 6).view(torch.float4_e2m1fn_x2)}},
    ],
    ids=["nothing", "no elements", "a dtype that cannot be copied"],
)
def test_odd_files(state):
    file, memory = file_of(state)
    with stager_of() as stager:
        staged = stager.stage(file, memory)
        assert differing(staged, file, memory) == []
        assert len(staged.slot.memory) == file.end


# ---- what is copied later --------------------------------------------------------------------------------------------


class HeldUp:
    """Patches `Slot.copy`: the thread that copies later waits for `go`."""

    def __init__(self, monkeypatch, error=None):
        self.go, self.copied = threading.Event(), threading.Event()
        original = Slot.copy

        def copy(slot, memory, numbers):
            later = threading.current_thread().name.startswith("ckptman-stage")
            if later:
                assert self.go.wait(WAIT)
                if error is not None:
                    raise error
            original(slot, memory, numbers)
            if later:
                self.copied.set()

        monkeypatch.setattr(Slot, "copy", copy)


@pytest.mark.parametrize("restored", [False, True])
def test_the_first_save_finds_its_memory_warm_also_in_a_loop_that_saves_without_a_step(tmp_path, monkeypatch, restored):
    if restored:
        with ckptman.Checkpointer(tmp_path, contents()) as checkpointer:
            checkpointer.save(1)
    allocated = []
    real = staging._allocate
    monkeypatch.setattr(staging, "_allocate", lambda size, path: allocated.append(size) or real(size, path))
    with ckptman.Checkpointer(tmp_path, contents()) as checkpointer:
        checkpointer.restore()
        assert len(allocated) == 1
        checkpointer.save(2)
        assert len(allocated) == 1


def test_what_may_be_copied_later_is_waited_for_before_a_change(monkeypatch):
    now, later = torch.zeros(1000), torch.zeros(1000)
    file, memory = file_of({"x": {"later": later, "now": now}})
    number = [piece.name for piece in file.pieces].index("x.later")
    with stager_of() as stager:
        for step in (1.0, 2.0):
            held = HeldUp(monkeypatch)
            now.fill_(step)
            later.fill_(step)
            staged = stager.stage(file, memory, {number})
            now.zero_()
            with behind(staged.wait) as waited, behind(staged.wait_staged) as let_go:
                assert not waited.wait(0.1)
                assert not let_go.is_set()
                held.go.set()
            later.zero_()
            assert differing(staged, file, [torch.full((1000,), step)] * 2) == []
            staged.release()
            monkeypatch.undo()


def test_data_that_is_swapped_while_it_is_copied_is_not_saved(tmp_path, monkeypatch):
    """As for an evaluation on averaged weights, right after a save; the second one takes over names from the first."""
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    kept = model.weight.detach().clone()
    with ckptman.Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}, overlap=True) as checkpointer:
        checkpointer.restore()
        checkpointer.save(1)
        checkpointer.wait()
        held = HeldUp(monkeypatch)
        checkpointer.save(2)
        model.weight.data = torch.full((300, 300), 7.0)
        held.go.set()
        checkpointer.wait()
        monkeypatch.undo()
    for step in (1, 2):
        saved = {"model.weight": torch.zeros(300, 300)}
        ckptman.load(saved, tmp_path / step_folder(step))
        assert torch.equal(saved["model.weight"], kept), f"step {step}"


def test_a_slot_is_not_free_while_what_was_to_be_copied_later_is_copied(monkeypatch):
    file, memory = file_of({"x": {"later": torch.zeros(1000), "now": torch.zeros(1000)}})
    number = [piece.name for piece in file.pieces].index("x.later")
    held = HeldUp(monkeypatch)
    waiting = Slot.copy

    def copy(slot, memory, numbers):
        if threading.current_thread().name.startswith("ckptman-stage"):
            waiting(slot, memory, numbers)
        else:
            raise RuntimeError("no")

    def fail():
        with pytest.raises(RuntimeError, match="no"):
            stager.stage(file, memory, {number})

    with stager_of(lambda size: False) as stager:
        stager.prepare(file, memory)
        stager.wait()
        monkeypatch.setattr(Slot, "copy", copy)
        with behind(fail) as done:
            assert not done.wait(0.1)
            held.go.set()
        assert held.copied.is_set()
        monkeypatch.undo()
        with behind(lambda: stager.stage(file, memory)):
            pass


def test_a_value_that_may_change_is_pickled_before_the_training_goes_on(tmp_path, monkeypatch):
    """On its stream, too: what the value holds may be on a device."""
    pickled, threads = writer.pickled, []

    def noted(value):
        if not isinstance(value, int):
            threads.append(threading.current_thread())
        return pickled(value)

    monkeypatch.setattr(writer, "pickled", noted)
    state = {"s": {"w": torch.zeros(10), "n": 5, "text": b"bytes", "array": np.arange(3)}}
    with ckptman.Checkpointer(tmp_path, state, deadline=None) as checkpointer:
        checkpointer.save(1)
    assert threads == [threading.current_thread()] * 2


# ---- saves one after the other ---------------------------------------------------------------------------------------


def value_of(path, size=1_000_000):
    """The one value that fills `s.w` of a checkpoint; an error if there are two."""
    state = {"s": {"w": torch.full((size,), -1.0)}}
    ckptman.load(state, path)
    (value,) = state["s"]["w"].unique().tolist()
    return value


def test_a_slot_is_not_taken_from_a_save_that_has_not_been_written(tmp_path, monkeypatch):
    """Save 1 is long in its commit, so that save 2 gets its slot; save 3 comes while 2 is being written."""
    tensor = torch.zeros(1_000_000)
    in_commit, may_commit, in_write, may_write = (threading.Event() for _ in range(4))
    commit, write, writes = CheckpointWriter._commit, CheckpointWriter._write, []

    def slow_commit(writing, *args):
        if not in_commit.is_set():
            in_commit.set()
            assert may_commit.wait(WAIT)
        return commit(writing, *args)

    def slow_write(writing, *args):
        writes.append(1)
        if len(writes) == 2:
            in_write.set()
            assert may_write.wait(WAIT)
        return write(writing, *args)

    monkeypatch.setattr(CheckpointWriter, "_commit", slow_commit)
    monkeypatch.setattr(CheckpointWriter, "_write", slow_write)
    with ckptman.Checkpointer(tmp_path, {"s": {"w": tensor}}, deadline=None) as checkpointer:
        tensor.fill_(1)
        checkpointer.save(1)
        assert in_commit.wait(WAIT)
        tensor.fill_(2)
        checkpointer.save(2)
        may_commit.set()
        assert in_write.wait(WAIT)
        tensor.fill_(3)
        timer = threading.Timer(0.5, may_write.set)
        timer.start()
        checkpointer.save(3)
        checkpointer.wait()
        timer.join()
    assert [value_of(tmp_path / f"step-{step:010d}") for step in (1, 2, 3)] == [1, 2, 3]


@pytest.mark.parametrize("error", [MemoryError("no memory for the values"), KeyboardInterrupt()], ids=repr)
def test_a_save_that_ends_before_the_write_behind_has_its_copy_frees_its_slot(tmp_path, monkeypatch, error):
    """Ctrl-C: in a notebook, say, where saves go on after it."""
    with ckptman.Checkpointer(tmp_path, contents(), deadline=None) as checkpointer:
        for step in (1, 2, 3):
            with monkeypatch.context() as patched, pytest.raises((ckptman.CommitError, KeyboardInterrupt)):
                patched.setattr(Content, "of", mock.Mock(side_effect=error))
                checkpointer.save(step)
                checkpointer.wait()
        with behind(lambda: checkpointer.save(4)):
            pass
    assert (tmp_path / "step-0000000004").is_dir()


def test_without_a_thread_to_write_behind_no_save_is_written_later_with_what_another_saves(tmp_path, monkeypatch):
    start, few = threading.Thread.start, [True]

    def limited(thread):
        if few and thread.name.startswith("ckptman-save"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    state = {"s": {"w": torch.zeros(1000)}}
    with pytest.warns(RuntimeWarning, match="saves will block training .*can't start new thread"):
        opened = ckptman.Checkpointer(tmp_path, state, deadline=None)
    with opened as checkpointer:
        checkpointer.save(1)
        few.clear()
        state["s"]["v"] = torch.zeros(3)  # planned anew
        for step in (2, 3):
            state["s"]["w"].fill_(step)
            checkpointer.save(step)
    assert [value_of(tmp_path / f"step-000000000{step}", 1000) for step in (1, 2, 3)] == [0, 2, 3]


_ENDS = """
import atexit, sys
import torch
import ckptman

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
never = ckptman.EverySteps(1000)
state = {"model": model, "optimizer": optimizer}
checkpointer = ckptman.Checkpointer(sys.argv[1], state, save_policy=never, overlap=True, deadline=None)
atexit.register(checkpointer.close)
for step in (1, 2):
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    checkpointer.step(step)
"""


@pytest.mark.slow
def test_a_run_that_is_closed_while_the_interpreter_leaves_saves_its_end(tmp_path):
    done = subprocess.run([sys.executable, "-c", _ENDS, str(tmp_path)], capture_output=True, timeout=240, check=True)
    assert b"Traceback" not in done.stderr
    assert (tmp_path / "step-0000000002").is_dir()


# ---- too little memory -----------------------------------------------------------------------------------------------


def patched_memory(left):
    """Let a Checkpointer see other memory than there is."""
    return mock.patch.object(staging, "available_bytes", left)


def test_too_little_memory_is_a_warning_and_saves_that_block(tmp_path):
    told = r"saves will block training until they are durable: .* 0\.5 GiB are left"
    with (
        patched_memory(lambda: RESERVE_BYTES + 1_000_000),
        pytest.warns(RuntimeWarning, match=told),
        ckptman.Checkpointer(tmp_path, {"s": {"w": torch.ones(1_000_000)}}, deadline=None) as checkpointer,
    ):
        for step in (1, 2):
            checkpointer.save(step)
            assert value_of(tmp_path / f"step-{step:010d}") == 1, "it is durable when save() returns"
        assert checkpointer._saver._stager.held_bytes == 0
    events, _ = read_journal(next(tmp_path.rglob("*.jsonl")))
    (refused,) = (each for each in events if each["event"] == "async_refused")
    assert "0.5 GiB are left" in refused["reason"]
    assert [each["event"] for each in events].count("save_durable") == 2
    assert "save_staged" not in {each["event"] for each in events}


def test_enough_memory_is_no_warning(tmp_path):
    state, left = {"s": {"w": torch.ones(1_000_000)}}, [RESERVE_BYTES + 4_500_000]
    with patched_memory(lambda: left[0]), ckptman.Checkpointer(tmp_path, state, deadline=None) as checkpointer:
        left[0] = RESERVE_BYTES + 500_000
        checkpointer.save(1)
        checkpointer.save(2)
        assert checkpointer._saver._stager.held_bytes < 4_500_000, "a second slot would not fit"
    assert value_of(tmp_path / "step-0000000002") == 1


def test_memory_that_cannot_be_taken_is_a_refusal_too(tmp_path):
    told = "rank 0 could not take memory for a private copy, .*: MemoryError: none left"
    with (
        mock.patch.object(staging, "_allocate", side_effect=MemoryError("none left")),
        pytest.warns(RuntimeWarning, match=told),
        ckptman.Checkpointer(tmp_path, {"s": {"w": torch.ones(1000)}}, deadline=None) as checkpointer,
    ):
        checkpointer.save(1)
        assert (tmp_path / "step-0000000001" / "manifest.json").exists()


def refused_on_one(root, short):
    """One rank has too little; what each is warned of, and whether its save was durable at once."""
    left = RESERVE_BYTES // 2 if dist.get_rank() == short else 1 << 50
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = {"s": {"w": torch.ones(300_000)}}
        with patched_memory(lambda: left), ckptman.Checkpointer(root, state, deadline=None) as checkpointer:
            checkpointer.save(1)
            durable = (Path(root) / "step-0000000001" / "manifest.json").exists()
            asynchronous = checkpointer._saver._asynchronous
    return [str(each.message) for each in caught if each.category is RuntimeWarning], durable, asynchronous


@pytest.mark.parametrize("short", [0, 1])
def test_all_ranks_save_alike_where_one_has_too_little(tmp_path, short):
    (told, *first), (quiet, *second) = run_ranks(2, refused_on_one, str(tmp_path), short)
    assert len(told) == 1
    assert "saves will block training" in told[0]
    assert quiet == [], "the leader says it once"
    assert first == second == [True, False]
    events, _ = read_journal(next(tmp_path.rglob("*.jsonl")))
    assert [each["event"] for each in events].count("async_refused") == 1

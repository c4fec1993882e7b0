"""What goes wrong is said on every rank, and nothing is lost."""

import contextlib
import errno
import os
import shutil
import threading
import warnings
from collections import deque
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist

import ckptman
from ckptman.engine.loading.checkpoint_reader import SavedState
from ckptman.engine.saving.retention_runner import RetentionRunner
from ckptman.engine.saving.writer import CheckpointWriter, Content
from ckptman.policies.save_policies import Decision
from ckptman.runtime.outcome import read_outcome
from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.io.durable_files import Disk
from tests.engine.dcp.test_values import save
from tests.helpers.apps import App
from tests.helpers.faulty_disk import on_disk
from tests.helpers.ranks import run_ranks

REAL_OPEN = os.open
READ = "ckptman.engine.loading.checkpoint_reader.read_wanted"


def open_run(root, app, **options):
    options.setdefault("save_policy", ckptman.EverySteps(1))
    return ckptman.Checkpointer(root, app.state, deadline=None, timeout_seconds=20, **options)


def failed(code):
    return OSError(code, os.strerror(code))


def save_steps(root, steps, app=None):
    app = app or App()
    with open_run(root, app) as checkpointer:
        for step in range(checkpointer.restore() + 1, steps + 1):
            app.train_step()
            checkpointer.step(step)
    return app


def damage(folder):
    """Flip a bit of a weight."""
    chunk = next(SavedState.read(folder).all_chunks("model.0.weight"))
    with (folder / chunk.file).open("r+b") as file:
        file.seek(chunk.payload + 5)
        byte = file.read(1)[0]
        file.seek(chunk.payload + 5)
        file.write(bytes([byte ^ 16]))


def test_a_disk_that_dies_under_a_root_is_not_told_as_a_root_that_cannot_be_made(tmp_path):
    dead = mock.patch.object(Disk, "sync_folder", side_effect=failed(errno.EROFS))
    with (
        pytest.raises(ckptman.CommitError, match=r"run cannot be flushed \(Read-only file system\): check the mount"),
        open_run(tmp_path / "run", App(), async_save=False) as checkpointer,
    ):
        checkpointer.save(1)
        with dead:  # as where the kernel gave it up
            checkpointer.save(2)
    assert [each.name for each in tmp_path.glob("run/step-*")] == ["step-0000000001"]


def test_a_damaged_newest_is_passed_over_with_a_warning(tmp_path):
    save_steps(tmp_path, 3)
    damage(tmp_path / "step-0000000003")
    (tmp_path / "step-0000000002" / "manifest.json").unlink()
    app = App(seed=3)
    with pytest.warns(RuntimeWarning) as warned, open_run(tmp_path, app) as checkpointer:
        assert checkpointer.restore() == 1
    texts = [str(each.message) for each in warned]
    assert any("step 3" in text and "__0_0.distcp does not match its digests in block" in text for text in texts)
    assert any("step 2" in text and "no manifest.json" in text for text in texts)
    journal = (tmp_path / ".ckptman" / "journal.jsonl").read_text()
    assert journal.count("restore_refused") == 2


def test_when_nothing_is_good_the_run_does_not_start_afresh(tmp_path):
    save_steps(tmp_path, 2)
    for folder in tmp_path.glob("step-*"):
        damage(folder)
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(ckptman.CorruptError, match=r"(?s)no checkpoint is good.*is not usable"),
        open_run(tmp_path, App(seed=3)) as checkpointer,
    ):
        checkpointer.restore()


@pytest.mark.parametrize("kept", [1, 0])
def test_a_checkpoint_that_goes_after_it_was_listed_is_not_the_end(tmp_path, kept, monkeypatch):
    app, real = App(seed=3), LocalBackend.list
    checkpointer = open_run(tmp_path / "run", app)
    saved = save_steps(tmp_path / "other", 2).digests()
    for step in range(2 - kept, 3):
        (tmp_path / "other" / f"step-000000000{step}").rename(tmp_path / "run" / f"step-000000000{step}")

    def list_and_lose(self, **options):
        entries = real(self, **options)
        with contextlib.suppress(FileNotFoundError):
            (tmp_path / "run" / "step-0000000002").rename(tmp_path / "away")
        return entries

    monkeypatch.setattr(LocalBackend, "list", list_and_lose)
    if kept:
        assert checkpointer.restore() == 1
    else:
        with pytest.raises(ckptman.RootError, match=r"holds none now: nothing is started at 0.*mounted"):
            checkpointer.restore()
    assert app.digests() != saved
    checkpointer.__exit__(RuntimeError, RuntimeError("the end"), None)


@pytest.mark.parametrize("failure", [failed(errno.ESTALE), MemoryError("no room")])
@pytest.mark.leaves("chunks.bin")  # the parameter keeps its traceback
def test_a_load_that_ends_in_the_middle_says_that_what_it_filled_is_not_usable(tmp_path, failure, monkeypatch):
    ckptman.save({"x": torch.ones(2**21)}, tmp_path / "x")
    state, real = {"x": torch.zeros(2**21)}, os.preadv

    def preadv(fd, buffers, offset, flags=0):
        if offset >= 2**22 and not flags:
            raise failure
        return real(fd, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setenv("CKPTMAN_IO_THREADS", "1")
    with pytest.raises(ckptman.CkptmanError, match=r"(Stale file handle|no room).*filled is not usable") as caught:
        ckptman.load(state, tmp_path / "x")
    assert isinstance(caught.value, ckptman.CorruptError) == isinstance(failure, OSError)
    assert state["x"].any()


def with_average(app, *, is_new=False):
    app.state["average"] = {} if is_new else {"weight": torch.zeros(3, 5)}
    return app


def refused(code):
    """An `os.open` that gives an error for what a checkpoint is made of."""

    def refuse(path, *args, **kwargs):
        if str(path).endswith(("chunks.bin", "index.json", ".distcp")):
            raise failed(code)
        return REAL_OPEN(path, *args, **kwargs)

    return refuse


def no_memory_for_numpy(*_, **__):
    numpy.empty(2**60, numpy.uint8)


def no_memory_left(*_, **__):
    return torch.zeros(1).new_empty(2**60)  # what torch raises has no class of its own


@pytest.mark.parametrize(
    ("what", "fault", "told"),
    [
        ("os.open", refused(errno.EMFILE), "not enough memory or open files"),
        ("torch.empty", no_memory_left, "not enough memory or open files"),
        ("ckptman.engine.loading.checkpoint_reader.open_table", no_memory_for_numpy, "not enough memory"),
        ("ckptman.storage.io.threads.aligned_memory", failed(errno.ENOMEM), "not enough memory"),
        (READ, RuntimeError("CUDA error: out of memory"), "not enough memory"),
        (READ, RuntimeError("CUDA error: illegal"), "device of rank 0 failed .*usable"),
        ("os.preadv", failed(errno.ENOTCONN), "file system does not answer on rank 0 .*not connected.* is not usable"),
        ("os.pread", failed(errno.ENOTCONN), "file system does not answer on rank 0 .*not connected"),  # chunk table
        ("os.preadv", failed(errno.ENODEV), "file system does not answer on rank 0 .*such device.* is not usable"),
        ("os.open", refused(errno.EACCES), "may not read it on rank 0 .*Permission denied.*check its permissions"),
    ],
)
@pytest.mark.leaves("chunks.bin")  # the parameter keeps its traceback
def test_what_is_no_fault_of_the_checkpoint_is_not_laid_to_it(tmp_path, what, fault, told, monkeypatch):
    save_steps(tmp_path, 2, with_average(App()))
    monkeypatch.setattr("ckptman.storage.io.threads._free", deque())
    with (
        open_run(tmp_path, with_average(App(seed=3), is_new=True)) as checkpointer,
        mock.patch(what, side_effect=fault),
        pytest.raises(ckptman.CkptmanError, match=told) as caught,
    ):
        checkpointer.restore()
    assert not isinstance(caught.value, ckptman.CorruptError)
    assert not list(tmp_path.glob("step-*/verified.json"))
    with open_run(tmp_path, with_average(App(seed=3))) as checkpointer:
        assert checkpointer.restore() == 2


def test_a_value_of_plain_dcp_that_cannot_be_read_is_found_before_a_tensor_is_filled(tmp_path):
    save({"x": torch.ones(1000), "values": {"seen": {1, 2}}}, tmp_path / "plain", "dcp")
    at = SavedState.read(tmp_path / "plain").object("values.seen")
    with (tmp_path / "plain" / at.file).open("r+b") as file:
        file.seek(at.offset)
        file.write(bytes(at.bytes))
    state = {"x": torch.zeros(1000), "values": {"seen": set()}}
    with ckptman.Checkpointer(tmp_path / "run", state, deadline=None) as checkpointer:
        with pytest.raises(ckptman.CorruptError, match=r"the value values\.seen was refused"):
            checkpointer.restore(path=tmp_path / "plain")
        assert not state["x"].any()


def test_a_step_that_does_not_exist(tmp_path):
    save_steps(tmp_path, 2)
    with (
        pytest.raises(ckptman.NotFoundError, match="no checkpoint of step 7; the latest there are: 1, 2"),
        open_run(tmp_path, App()) as checkpointer,
    ):
        checkpointer.restore(step=7)


def test_a_root_that_is_a_file(tmp_path):
    path = tmp_path / "run"
    path.write_text("something else")
    with pytest.raises(ckptman.RootError, match="is a file"):
        open_run(path, App())
    assert path.read_text() == "something else"


def restore_other_shape(root):
    app = App((2,), width=6, seed=4)
    app.model.register_buffer("extra", torch.zeros(2))
    before = app.digests()
    with pytest.raises(ckptman.MismatchError) as caught, open_run(root, app) as checkpointer:
        checkpointer.restore()
    return str(caught.value), app.digests() == before


def test_a_model_that_differs_is_told_with_every_name_before_a_byte_is_copied(tmp_path):
    save_steps(tmp_path, 1)
    (text, untouched), (other, _) = run_ranks(2, restore_other_shape, str(tmp_path), fresh=True)
    assert text == other
    assert untouched
    assert "missing in the checkpoint (1):\n    model.extra" in text
    assert "model.0.weight: checkpoint [7, 5] float32, this run [6, 5] float32" in text


def test_state_that_is_gone_from_the_run_is_told(tmp_path):
    save_steps(tmp_path, 1)
    app = App()
    del app.state["scheduler"]
    app.state["ema"] = {"decay": 0.9}
    with pytest.raises(ckptman.MismatchError) as caught, open_run(tmp_path, app) as checkpointer:
        checkpointer.restore()
    assert caught.value.missing == ("ema",)
    assert caught.value.unexpected == ("scheduler",)


def test_a_value_that_cannot_be_saved_is_named_and_the_run_can_go_on(tmp_path):
    app = App()
    with open_run(tmp_path, app) as checkpointer:
        app.train_step()
        app.state["data"].next_sample = object()
        with pytest.raises(ckptman.ConfigError, match=r"data\.next_sample is a builtins\.object"):
            checkpointer.step(1)
        app.state["data"].next_sample = 12
        app.train_step()
        checkpointer.step(2)
    assert [each.name for each in sorted(tmp_path.glob("step-*"))] == ["step-0000000002"]


def test_an_object_that_cannot_give_its_state_is_not_taken_for_the_disk(tmp_path):
    class Unready:
        def state_dict(self):
            raise ValueError("not yet")

        def load_state_dict(self, values):
            pass

    with (
        pytest.raises(
            ckptman.CkptmanError, match=r"'data': Unready\.state_dict\(\) failed on rank 0: ValueError: not yet"
        ),
        ckptman.Checkpointer(tmp_path, {"data": Unready()}, deadline=None) as checkpointer,
    ):
        checkpointer.save(1)


class Broken(ckptman.SavePolicy):
    def decide(self, facts):
        raise ZeroDivisionError("division by zero")


def use_broken_policy(root):
    with pytest.raises(ckptman.ConfigError) as caught, open_run(root, App((2,)), save_policy=Broken()) as checkpointer:
        checkpointer.step(1)
    return str(caught.value)


def be_out_of_step(root):
    with pytest.raises(ckptman.ConfigError) as caught, open_run(root, App((2,))) as checkpointer:
        checkpointer.step(1 + dist.get_rank())
    return str(caught.value)


@pytest.mark.parametrize(
    ("misuse", "told"),
    [
        (use_broken_policy, "the save policy failed: ZeroDivisionError: division by zero"),
        (be_out_of_step, "the ranks are at different steps, from 1 to 2"),
    ],
)
def test_what_is_wrong_with_a_step_is_told_on_every_rank(tmp_path, misuse, told):
    assert run_ranks(2, misuse, str(tmp_path), fresh=True) == [told] * 2


# ---- saves that fail on one rank -------------------------------------------------------------------------------------

NOT_FORESEEN, FULL = TypeError("what nobody thought of"), OSError(errno.ENOSPC, "No space left on device")
FAULTS = {
    "content": (Content, "of", NOT_FORESEEN),
    "write": (CheckpointWriter, "_write", NOT_FORESEEN),
    "prune": (RetentionRunner, "prune", NOT_FORESEEN),
    "disk": (Disk, "sync_file", FULL),
}


def fail_once(root, where, async_save):
    """An error on one rank, in a save that the loop waits for; the next save is good."""
    app, events = App((2,)), []
    owner, name, fault = FAULTS[where]
    with open_run(root, app, async_save=async_save, save_policy=ckptman.AtStep(10**6)) as checkpointer:
        checkpointer.restore()
        app.train_step()
        patch = mock.patch.object(owner, name, side_effect=fault)
        with patch if dist.get_rank() == 1 or where == "prune" else contextlib.nullcontext():
            try:
                checkpointer.save(1)
                checkpointer.wait()
            except ckptman.CommitError as error:
                assert str(fault) in error.cause
                events.append(f"told of rank {error.rank}")
            else:
                events.append("saved")
        app.train_step()
        checkpointer.save(2)
        events.append("saved")
    return events


@pytest.mark.slow
@pytest.mark.parametrize(("where", "async_save"), [*((where, False) for where in FAULTS), ("disk", True)])
def test_a_failed_save_names_rank_and_cause_on_all_ranks_and_the_run_saves_again(tmp_path, where, async_save):
    first = "saved" if where == "prune" else "told of rank 1"
    assert run_ranks(2, fail_once, str(tmp_path), where, async_save, limit=40) == [[first, "saved"]] * 2
    assert (tmp_path / "step-0000000002" / "manifest.json").exists()
    assert (tmp_path / "step-0000000001").exists() == (first == "saved")


class GatedDisk(Disk):
    """Once it is full, holds the background thread until it is let go, and then refuses to flush."""

    def __init__(self):
        self.gate, self.full = threading.Event(), False

    def sync_file(self, fd):
        if self.full and threading.current_thread().name.startswith("ckptman-save"):
            self.gate.wait()
        if self.full:
            raise FULL
        super().sync_file(fd)


def fail_in_the_background(root, policy, last, known_at, waits):
    """Train while a save fails on rank 1, which is known before `known_at` ends. Returns what was told by `step`, or by
    the `wait` behind it, the steps that were saved, how many warnings say that a save is tried once more, and the last
    step."""
    app, disk, told, saved, step = App((2,)), GatedDisk(), [], [], 0

    def let_it_fail():
        disk.gate.set()
        with contextlib.suppress(Exception):
            checkpointer._saver._running[-1].wait()  # only to make the order certain
        disk.full = False

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with on_disk(disk), open_run(root, app, save_policy=policy) as checkpointer:
            checkpointer.restore()
            disk.full = dist.get_rank() == 1
            for step in range(1, last + 1):
                app.train_step()
                if step == known_at:
                    let_it_fail()
                try:
                    if checkpointer.step(step):
                        saved.append(step)
                    if waits and step == known_at:
                        checkpointer.wait()
                except ckptman.CommitError as error:
                    told.append(f"save {error.step} at step {step}")
                if checkpointer.should_stop():
                    break
            let_it_fail()
    return told, saved, sum("tried once more" in str(each.message) for each in warned), step


class StopAt(ckptman.SavePolicy):
    """Saves at step 2, and saves and stops at step 4."""

    def decide(self, facts):
        return Decision("planned", stop=facts.step == 4) if facts.step in (2, 4) else None


@pytest.mark.parametrize(
    ("policy", "last", "known_at", "waits", "expected"),
    [
        # It is known when step 4 ends, and travels to step 5; it is told once, and the save is tried again.
        (ckptman.AtStep(2, 7), 8, 4, False, (["save 2 at step 5"], [2, 6, 7], 0, 8)),
        (ckptman.AtStep(2), 8, 4, True, (["save 2 at step 4"], [2, 6], 0, 8)),
        # Nobody was told yet when the run ends.
        (ckptman.AtStep(3), 3, None, False, ([], [3], 1, 3)),
        (StopAt(), 8, 4, False, ([], [2, 4], 1, 4)),
    ],
    ids=["told by step", "told by wait", "at the end", "at a stop of the policy"],
)
def test_a_failure_in_the_background_is_told_once_on_all_ranks(tmp_path, policy, last, known_at, waits, expected):
    found = run_ranks(2, fail_in_the_background, str(tmp_path), policy, last, known_at, waits)
    assert found == [expected] * 2
    assert (tmp_path / f"step-{expected[-1]:010d}" / "manifest.json").exists()


def wait_unlike(root):
    """Rank 1 alone knows that the save has failed: its connection broke when the others had finished."""
    app, rank = App((2,)), dist.get_rank()
    with open_run(root, app) as checkpointer:
        checkpointer.restore()
        app.train_step()
        checkpointer.save(1)
        reports, failure = checkpointer._saver.wait()
        broken = ([], ckptman.CommitError(1, -1, "the connection broke")) if rank == 1 else (reports, failure)
        with mock.patch.object(checkpointer._saver, "wait", return_value=broken), pytest.raises(ckptman.CommitError):
            checkpointer.wait()
        app.train_step()
        checkpointer.save(2)
        checkpointer.wait()


def test_wait_raises_on_all_ranks_or_on_none(tmp_path):
    run_ranks(2, wait_unlike, str(tmp_path))
    assert (tmp_path / "step-0000000002" / "manifest.json").exists()


def test_a_first_step_after_a_save_waits_for_it_before_it_plans_anew(tmp_path):
    """The optimizer got its state in between, so that what was planned no longer fits."""
    app, gate = App(), threading.Event()
    original = CheckpointWriter._write

    def held(writing, *args):
        assert gate.wait(20)
        return original(writing, *args)

    with mock.patch.object(CheckpointWriter, "_write", held), open_run(tmp_path, app) as checkpointer:
        checkpointer.restore()
        app.state["extra"] = torch.zeros(3)
        checkpointer.save(1)
        app.state["more"] = torch.zeros(300_000)
        app.train_step()
        timer = threading.Timer(0.2, gate.set)
        timer.start()
        checkpointer.step(2)
        timer.join()
    for step, more in ((1, False), (2, True)):
        assert ("more" in SavedState.read(tmp_path / f"step-{step:010d}").index.tensors) == more


def test_a_path_that_is_no_utf_8_is_refused(tmp_path):
    root = tmp_path / os.fsdecode(b"run-\xff")
    with pytest.raises(ckptman.ConfigError, match="is not valid UTF-8"):
        ckptman.Checkpointer(root, {"n": 0})
    assert not root.exists()
    ckptman.Checkpointer(tmp_path / "Läufe", {"n": 0}, deadline=None).close()


def test_a_copy_of_a_root_is_told_that_it_is_the_same_run(tmp_path):
    first, copied = tmp_path / "first", tmp_path / "copied"
    with ckptman.Checkpointer(first, {"n": 0}, deadline=None) as checkpointer:
        checkpointer.save(1)
        run_id = checkpointer.run_id
    shutil.copytree(first, copied)
    with pytest.warns(RuntimeWarning, match=rf"copied is a copy of .*first, and goes on as the same run \({run_id}\)"):
        ckptman.Checkpointer(copied, {"n": 0}, deadline=None).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ckptman.Checkpointer(copied, {"n": 0}, deadline=None).close()  # it is known by its own path now
        moved = copied.rename(tmp_path / "moved")
        ckptman.Checkpointer(moved, {"n": 0}, deadline=None).close()
        named = shutil.copytree(first, tmp_path / "named")
        ckptman.Checkpointer(named, {"n": 0}, run_id="another", deadline=None).close()


@pytest.mark.parametrize("name", ["int1", "int4", "uint7"])
def test_elements_below_a_byte_are_refused_with_what_to_do(tmp_path, name):
    tensor = torch.empty(8, dtype=torch.uint8).view(getattr(torch, name))
    with pytest.raises(ckptman.ConfigError, match=rf"t\.x is of torch\.{name}, .*view\(torch\.uint8\)"):
        ckptman.Checkpointer(tmp_path, {"t": {"x": tensor}}, deadline=None)


def test_a_run_that_cannot_begin_tells_its_chain_why(tmp_path, monkeypatch):
    monkeypatch.setenv("CKPTMAN_OUTCOME", str(tmp_path / "outcome"))
    (tmp_path / "file").touch()
    with pytest.raises(ckptman.RootError):
        open_run(tmp_path / "file", App())
    told = read_outcome(tmp_path / "outcome")
    assert (told.state, told.step, told.root) == ("failed", 0, str(tmp_path / "file"))
    assert told.reason.startswith("RootError: ")
    with open_run(tmp_path / "root", App()) as first:
        first.restore()
        with pytest.raises(ckptman.BusyError):
            open_run(tmp_path / "root", App())
        told = read_outcome(tmp_path / "outcome")
        assert (told.state, told.exit_code) == ("failed", ckptman.BusyError.exit_code)
    assert read_outcome(tmp_path / "outcome").state == "finished"

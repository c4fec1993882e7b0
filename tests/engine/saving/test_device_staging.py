"""Private copies of what is on a device, a pretended one: streams, pinned memory, graphs, and what goes wrong there."""

import gc
import os
import threading
import time
import warnings
from unittest import mock

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import ckptman
from ckptman.engine.saving import staging
from ckptman.engine.saving.staging import Slot
from ckptman.engine.state import accelerators
from ckptman.engine.state.file_layout import Image
from tests.engine.dcp.test_values import differing as differing_values
from tests.engine.saving.test_staging import behind, differing, file_of, stager_of
from tests.gpu.device import Run, check_saved, open_run, values_of
from tests.helpers.fake_device import OnDevice, fake_devices

ZERO = torch.device("cuda", 0)


@pytest.fixture
def device():
    with fake_devices(count=2) as made:
        yield made


@pytest.fixture
def stager():
    with stager_of() as made:
        yield made


@pytest.fixture(autouse=True)
def _no_buffers_of_before(monkeypatch):
    monkeypatch.setattr(accelerators, "_free", accelerators.deque())
    monkeypatch.setattr(accelerators, "_warned", False)


def slot_for(file, memory):
    """A slot that is pinned, as the first one of a file."""
    slot, device = Slot(file, [staging._kind(each) for each in memory]), staging._device_of(memory)
    if device is not None:
        slot.pin(device)
    return slot


class Three:
    """Tensors "a", "b" and "c" of ones, twos and threes; the first two on a device."""

    def __init__(self, device):
        values = {"a": torch.full((300,), 1.0), "b": torch.full((200,), 2.0), "c": torch.full((100,), 3.0)}
        self.file, on_host = file_of({"x": values})
        self.names = [piece.name for piece in self.file.pieces]
        self.device = device
        self.memory = [each if name == "x.c" else device.tensor(each) for name, each in zip(self.names, on_host)]

    def number(self, name):
        return self.names.index(f"x.{name}")

    def __getitem__(self, name):
        return self.memory[self.number(name)]

    def staged(self, staged):
        """The value that fills each staged tensor."""
        found = {}
        for name, count in (("a", 300), ("b", 200), ("c", 100)):
            place = self.file.places[self.number(name)].payload
            (found[name],) = torch.frombuffer(
                staged.slot.memory, dtype=torch.float32, count=count, offset=place
            ).unique()
        return found


def test_tensors_of_the_host_are_copied_behind_the_training_beside_a_device_too(device, stager, monkeypatch):
    three, threads, copy = Three(device), {}, Slot.copy

    def noted(slot, memory, numbers):
        threads.update(dict.fromkeys(numbers, threading.current_thread().name))
        copy(slot, memory, numbers)

    monkeypatch.setattr(Slot, "copy", noted)
    staged = stager.stage(three.file, three.memory, {three.number("c")})
    staged.wait()
    assert threads[three.number("c")].startswith("ckptman-stage")
    assert threads[three.number("a")] == threading.current_thread().name
    assert three.staged(staged) == {"a": 1.0, "b": 2.0, "c": 3.0}


def test_no_thread_makes_a_context_on_a_device_of_another_rank(device, stager):
    device.set_device(1)
    inner = torch.arange(300.0)
    file, memory = file_of({"x": {"a": inner}})
    on_device = [device.tensor(memory[0], 1)]
    staged = stager.stage(file, on_device, {0})
    staged.wait()
    assert differing(staged, file, memory) == []
    staged.release()
    image = Image([(0, on_device[0])])
    scratch, found = memoryview(bytearray(4096)), []
    with behind(lambda: found.append(bytes(image.view(0, scratch))[: inner.nbytes])):
        pass
    assert found == [bytes(inner.numpy().tobytes())]
    stager.close()
    assert device.contexts == {1}


def test_a_tensor_made_of_others_is_copied_to_the_host_with_the_rest(device, stager):
    three = Three(device)
    parts = device.tensor(torch.full((5,), 1.0)), device.tensor(torch.full((5,), 2.0))
    stager.prepare(three.file, three.memory)
    stager.wait()
    with device.main.held():
        parts[0].fill_(7.0)
        staged = stager.stage(three.file, three.memory, {three.number("b")}, [TwoTensor(*parts)])
        for part in parts:
            part.fill_(9.0)
    staged.wait()
    (special,) = staged.special
    assert isinstance(special, TwoTensor)
    assert [each.unique().tolist() for each in (special.a, special.b)] == [[7.0], [2.0]]
    assert not isinstance(special.a, OnDevice), "nothing is asked of the device when it is pickled"


def test_pinned_memory_is_given_up_while_it_is_mapped(device, stager):
    three, runtime = Three(device), device.runtime
    for give_up in (stager.give_back, stager.close):
        stager.stage(three.file, three.memory).release()
        assert [*runtime.registered.values()] == [three.file.end]
        give_up()
        assert runtime.registered == {}
    slot = slot_for(three.file, three.memory)
    assert runtime.calls == ["register", "unregister"] * 2 + ["register"]
    del slot  # which nobody gave up
    gc.collect()
    assert runtime.registered == {}


def test_memory_that_cannot_be_pinned_is_used_as_it_is_with_a_warning(device, stager):
    three = Three(device)
    device.runtime.fails = True
    with pytest.warns(RuntimeWarning, match=r"host memory cannot be pinned \(2\): .*ulimit -l"):
        staged = stager.stage(three.file, three.memory)
    assert three.staged(staged) == {"a": 1.0, "b": 2.0, "c": 3.0}
    three["a"].fill_(4.0)  # a kernel, which would find the error of the runtime
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = stager.stage(three.file, three.memory)
    assert second.slot is not staged.slot
    assert three.staged(second) == {"a": 4.0, "b": 2.0, "c": 3.0}


@pytest.mark.parametrize("memfd", [True, False])
def test_a_fork_leaves_the_memory_of_a_slot_what_it_is(memfd):
    """A page of private memory that is written after a fork becomes another one, of which a device does not know."""
    file, memory = file_of({"x": {"w": torch.zeros(300_000)}})
    with mock.patch.object(
        staging, "shared_memory", side_effect=None if memfd else OSError, wraps=staging.shared_memory
    ):
        slot = slot_for(file, memory)
    assert (slot.fd is not None) == memfd
    place = file.places[0].payload
    ready, written = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.write(ready[1], b"r")
        os.read(written[0], 1)
        os._exit(slot.memory[place])
    os.read(ready[0], 1)
    slot.memory[place] = 77
    os.write(written[1], b"w")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 77
    if slot.fd is not None:
        assert os.pread(slot.fd, 1, place) == bytes([77])
    for fd in (*ready, *written):
        os.close(fd)
    slot.close()


def failing_put(monkeypatch, at):
    put, calls = staging.put, []

    def one_by_one(*_):
        raise RuntimeError("copy_ not implemented")

    def failing(*args, **options):
        calls.append(1)
        if len(calls) == at:
            raise RuntimeError("CUDA error: out of memory")
        put(*args, **options)

    monkeypatch.setattr(staging, "put", failing)
    monkeypatch.setattr(staging, "copy_all", one_by_one)


@pytest.mark.parametrize("at", [2, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_slot_is_not_free_while_a_device_still_copies_for_a_save_that_failed(
    device, stager, monkeypatch, overlap, at
):
    """The second copy of three fails, on the device, or the third, on the host."""
    three = Three(device)
    stager._streams[ZERO] = device.Stream(ZERO)
    stager.prepare(three.file, three.memory)
    stager.wait()
    failing_put(monkeypatch, at)

    def fail():
        with pytest.raises(RuntimeError, match="out of memory"):
            stager.stage(three.file, three.memory, {three.number("b")} if overlap else set())

    go = stager._streams[ZERO].hold()
    with behind(fail) as done:
        assert not done.wait(0.2)
        assert not stager._slots[0].free
        go.set()
    assert stager._slots[0].free
    monkeypatch.undo()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_device_that_fails_in_the_middle_of_a_copy_fails_the_save(device, stager, overlap):
    three = Three(device)
    stager.prepare(three.file, three.memory)
    stager.wait()

    def fail():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    device.main.submit(fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        stager.stage(three.file, three.memory, {three.number("b")} if overlap else set()).wait()
    device.error = None


@pytest.fixture
def slow(device, monkeypatch):
    """Each copy from the device takes its time."""
    copy = Slot.copy

    def slowly(slot, memory, numbers):
        if any(memory[number].device == ZERO for number in numbers):
            device.current_stream(ZERO).submit(lambda: time.sleep(0.2))
        copy(slot, memory, numbers)

    monkeypatch.setattr(Slot, "copy", slowly)


def captured(device, run):
    with device.capture() as graph:
        run.second.step()
    return graph.replay


def check_replays_at_once(checkpointer, device, run, replay, step):
    """Save, and go on with steps that call no hook, while nothing is copied until the end."""
    kept = run.copies()
    checkpointer.save(step)
    replay()
    replay()
    checkpointer.wait()
    check_saved(checkpointer.root, device, {step: kept})


def test_steps_of_a_graph_do_not_change_what_is_being_copied(device, tmp_path, slow):
    run = Run(device)
    with open_run(tmp_path, run.state, overlap=True) as checkpointer:
        replay = captured(device, run)
        with pytest.warns(RuntimeWarning, match="captured into a graph"):
            check_replays_at_once(checkpointer, device, run, replay, 1)
        check_replays_at_once(checkpointer, device, run, replay, 2)


def test_steps_of_a_graph_of_before_the_run_do_not_change_what_is_being_copied(device, tmp_path, slow):
    run = Run(device)
    replay = captured(device, run)
    with open_run(tmp_path, run.state, overlap=True) as checkpointer:
        check_replays_at_once(checkpointer, device, run, replay, 1)


def test_an_optimizer_that_is_meant_for_graphs_is_not_overlapped(device, tmp_path, slow):
    run = Run(device)
    run.second.param_groups[0]["capturable"] = True
    with open_run(tmp_path, run.state, overlap=True) as checkpointer:
        with pytest.warns(RuntimeWarning, match="capturable=True"):
            checkpointer.save(1)
        assert checkpointer._saver._staged == []


def test_a_graph_can_be_captured_while_a_save_is_being_copied(device, tmp_path, slow):
    """It neither waits for an event that is not in it, nor does anybody ask the device for one meanwhile."""
    run = Run(device)
    with open_run(tmp_path, run.state, overlap=True) as checkpointer:
        kept = run.copies()
        checkpointer.save(1)
        replay = captured(device, run)
        replay()
        device.synchronize()
    check_saved(tmp_path, device, {1: kept})
    assert "second.weight" in differing_values(values_of(device, run.tensors()), values_of(device, kept))


def saved_and_loaded(device, root, values):
    """What a save that blocks has of tensors on the device; a view of a transposed one stays one."""
    state = {name: device.tensor(each.T if name == "transposed" else each) for name, each in values.items()}
    if "transposed" in state:
        state["transposed"] = state["transposed"].T
    ckptman.save({"x": state}, root / "saved")
    found = {name: torch.zeros_like(each) for name, each in values.items()}
    ckptman.load({"x": found}, root / "saved")
    return found


def test_saves_that_block_go_through_pinned_memory(device, tmp_path):
    values = {"line": torch.randn(70_000), "transposed": torch.randn(500, 300).T}
    values["complex"] = torch.randn(40, 40, dtype=torch.complex64)
    asked, pinned = [], device.is_pinned
    with mock.patch.object(device, "is_pinned", lambda each: asked.append(pinned(each)) or asked[-1]):
        assert differing_values(saved_and_loaded(device, tmp_path, values), values) == []
    assert asked
    assert all(asked)


def test_saves_that_block_need_no_pinned_memory(device, tmp_path):
    values = {"line": torch.randn(70_000)}
    refused = mock.patch.object(device, "empty_pinned", side_effect=RuntimeError("CUDA error: out of memory"))
    with refused, pytest.warns(RuntimeWarning, match="host memory cannot be pinned"):
        assert differing_values(saved_and_loaded(device, tmp_path, values), values) == []


def test_memory_is_pinned_between_steps_a_piece_at_a_time(device, stager, monkeypatch):
    monkeypatch.setattr(staging, "_PIN_BYTES", 1)
    file, memory = file_of({"x": {name: torch.ones(400_000) for name in "abc"} | {"small": torch.ones(3)}})
    on_device = [device.tensor(each) for each in memory]
    stager.prepare(file, on_device)
    stager.make_slots(2)
    assert device.runtime.registered == {}, "restore() returns before anything is pinned"
    with device.capture():
        stager.pin_some(1)
        assert device.runtime.registered == {}, "nobody may pin while a graph is captured"
    pieces = 0
    while not all(slot.is_pinned for slot in stager._slots):
        stager.pin_some(0)
        pieces += 1
        assert len(device.runtime.registered) == pieces
    assert pieces == 2 * (1 + 3), "what comes before the first, and each tensor"
    assert sum(device.runtime.registered.values()) == 2 * file.end
    for slot in stager._slots:
        starts = {address - slot._bytes.data_ptr() for address in device.runtime.registered}
        for place in file.places:
            inside = range(place.offset + 1, place.offset + place.bytes)
            assert not [low for low in starts if low in inside and low != place.payload], "a copy would cross pieces"
    stager.pin_some(0)
    assert len(device.runtime.registered) == pieces
    staged = stager.stage(file, on_device)
    assert differing(staged, file, memory) == []
    staged.release()
    stager.close()
    assert device.runtime.registered == {}


def test_a_save_that_comes_early_pins_what_is_left(device, stager, monkeypatch):
    monkeypatch.setattr(staging, "_PIN_BYTES", 1)
    file, memory = file_of({"x": {name: torch.ones(400_000) for name in "abc"}})
    on_device = [device.tensor(each) for each in memory]
    stager.prepare(file, on_device)
    staged = stager.stage(file, on_device)
    assert sum(device.runtime.registered.values()) == file.end
    assert differing(staged, file, memory) == []


def test_pieces_that_are_refused_leave_the_others_as_they_are(device, stager, monkeypatch):
    monkeypatch.setattr(staging, "_PIN_BYTES", 1)
    file, memory = file_of({"x": {name: torch.ones(400_000) for name in "abc"}})
    on_device = [device.tensor(each) for each in memory]
    stager.prepare(file, on_device)
    stager.wait()
    stager.pin_some(0)
    device.runtime.fails = True
    with pytest.warns(RuntimeWarning, match="cannot be pinned"):
        staged = stager.stage(file, on_device)
    assert len(device.runtime.registered) == 1
    assert differing(staged, file, memory) == []
    staged.release()
    stager.close()
    assert device.runtime.registered == {}

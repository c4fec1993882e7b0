"""The methods of a Checkpointer called in ways that nobody should: each is refused in one line, and nothing is lost."""

import os
import signal
import threading

import pytest
import torch

import ckptman
from ckptman.errors import ConfigError
from ckptman.policies.save_policies import Decision


def small_state():
    model = torch.nn.Linear(2, 2)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)}


CALLS = {
    "restore": lambda checkpointer: checkpointer.restore(),
    "step": lambda checkpointer: checkpointer.step(3),
    "save": lambda checkpointer: checkpointer.save(3),
    "wait": lambda checkpointer: checkpointer.wait(),
}


@pytest.mark.parametrize("name", CALLS)
def test_after_close(tmp_path, name):
    checkpointer = ckptman.Checkpointer(tmp_path, small_state())
    checkpointer.restore()
    checkpointer.save(1)
    checkpointer.close()
    checkpointer.close()  # changes nothing
    with pytest.raises(ConfigError, match=f"this Checkpointer of {tmp_path} is closed"):
        CALLS[name](checkpointer)
    with pytest.raises(ConfigError, match="is closed"), checkpointer:
        pass
    assert (checkpointer.exit_code, checkpointer.last_saved, checkpointer.saving) == (0, 1, False)
    assert [each.step for each in ckptman.Run(tmp_path).checkpoints] == [1]


class Calling:
    """An object of the state that calls the Checkpointer while it is asked for its state."""

    call = None

    def state_dict(self):
        if self.call is not None:
            self.call()
        return {"x": 1}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("name", [*CALLS, "close"])
def test_from_within_another_call(tmp_path, name):
    calling, refused = Calling(), []

    def call():
        try:
            CALLS[name](checkpointer) if name != "close" else checkpointer.close()
        except ConfigError as error:
            refused.append(str(error))

    with ckptman.Checkpointer(tmp_path, {**small_state(), "calling": calling}, save_policy=1) as checkpointer:
        checkpointer.restore()
        calling.call = call
        checkpointer.save(1)
        calling.call = None
        checkpointer.step(2)
    assert refused
    assert all(each.startswith(f"{name}() is called while save() of the same Checkpointer runs") for each in refused)
    assert "note there that a save is wanted, and call it between two steps" in refused[0]
    assert [each.step for each in ckptman.Run(tmp_path).checkpoints] == [1, 2]


def test_save_in_a_signal_handler(tmp_path):
    """As in many scripts: what comes between two calls saves, what comes within one is refused."""
    calling = Calling()
    before = signal.signal(signal.SIGUSR1, lambda *_: checkpointer.save(1))
    try:
        with ckptman.Checkpointer(tmp_path, {**small_state(), "calling": calling}, signals=None) as checkpointer:
            os.kill(os.getpid(), signal.SIGUSR1)
            calling.call = lambda: os.kill(os.getpid(), signal.SIGUSR1)
            with pytest.raises(ConfigError, match=r"save\(\) is called while step\(\) .* by a signal handler"):
                checkpointer.step(2)
                checkpointer.step(3)
            calling.call = None
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert 1 in [each.step for each in ckptman.Run(tmp_path).checkpoints]


@pytest.mark.parametrize("name", CALLS)
def test_from_another_thread_meanwhile(tmp_path, name):
    calling, refused = Calling(), []

    def call():
        with pytest.raises(ConfigError) as caught:
            CALLS[name](checkpointer)
        refused.append(str(caught.value))

    def in_a_thread():
        thread = threading.Thread(target=call, name="evaluation")
        thread.start()
        thread.join()

    with ckptman.Checkpointer(tmp_path, {**small_state(), "calling": calling}) as checkpointer:
        checkpointer.restore()
        calling.call = in_a_thread
        checkpointer.save(1)
        calling.call = None
    assert f"{name}() is called while save() of the same Checkpointer runs, in thread 'evaluation'" in refused[0]
    assert "call it in the thread that trains" in refused[0]
    assert [each.step for each in ckptman.Run(tmp_path).checkpoints] == [1]


def test_training_in_a_thread(tmp_path):
    def train():
        with ckptman.Checkpointer(tmp_path, small_state(), save_policy=2) as checkpointer:
            for step in range(checkpointer.restore() + 1, 5):
                checkpointer.step(step)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert [each.step for each in ckptman.Run(tmp_path).checkpoints] == [2, 4]


def test_restore_twice(tmp_path):
    with ckptman.Checkpointer(tmp_path, small_state(), save_policy=1) as checkpointer:
        assert (checkpointer.restore(), checkpointer.restore()) == (0, 0)
        checkpointer.step(1)
    state = small_state()
    with ckptman.Checkpointer(tmp_path, state, save_policy=1) as checkpointer:
        assert (checkpointer.restore(), checkpointer.restore()) == (1, 1)
        checkpointer.step(2)
        assert checkpointer.restore() == 2  # goes back to what is saved
        checkpointer.step(3)
    assert [each.step for each in ckptman.Run(tmp_path).checkpoints] == [1, 2, 3]


def test_saves_alone_are_told_with_their_step(tmp_path, caplog):
    caplog.set_level("INFO", "ckptman")
    with ckptman.Checkpointer(tmp_path, small_state()) as checkpointer:
        checkpointer.save(7)
        assert "step 7" in repr(checkpointer)
    assert "finished after step 7: exit code 0" in caplog.text


def test_a_block_within_its_own_block(tmp_path):
    with ckptman.Checkpointer(tmp_path, small_state(), save_policy=1) as checkpointer:
        with checkpointer:
            checkpointer.step(1)
        with pytest.raises(ConfigError, match="is closed, as its `with` block has ended"):
            checkpointer.step(2)
    assert [each.step for each in ckptman.Run(tmp_path).checkpoints] == [1]


class Broken:
    """An object that cannot be saved any more."""

    is_broken = False

    def state_dict(self):
        if self.is_broken:
            raise ValueError("no")
        return {"x": 1}

    def load_state_dict(self, state):
        pass


def test_what_cannot_be_saved_keeps_no_run_from_stopping_where_nothing_is_to_be_saved(tmp_path):
    broken = Broken()
    with ckptman.Checkpointer(
        tmp_path, {"broken": broken}, save_policy=1000, save_on_stop=False, signals=True
    ) as checkpointer:
        checkpointer.step(1)
        broken.is_broken = True
        os.kill(os.getpid(), signal.SIGTERM)
        step = 1
        while not checkpointer.should_stop():
            step += 1
            checkpointer.step(step)
    assert (checkpointer.exit_code, ckptman.Run(tmp_path).checkpoints) == (75, [])


class Leaving(ckptman.SavePolicy):
    """Saves at step 2, and leaves."""

    def decide(self, facts):
        return Decision("before the deadline", stop=True) if facts.step == 2 else None


def test_a_channel_lost_in_the_last_wait_takes_no_last_save(tmp_path, monkeypatch):
    with ckptman.Checkpointer(tmp_path, small_state(), save_policy=Leaving(), save_on_stop=False) as checkpointer:
        checkpointer.step(1)
        saver = checkpointer._saver
        before, wait = saver.channel, saver.wait

        def lose():
            before.lost = True  # as by a save in the background that ends meanwhile
            return wait()

        monkeypatch.setattr(saver, "wait", lose)
        checkpointer.step(2)
        assert saver.channel is not before
    assert [each.step for each in ckptman.Run(tmp_path).checkpoints] == [2]

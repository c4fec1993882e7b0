"""`ckptman ask` and a run on two ranks: all of them save, or stop, at the same step, and the answer names it."""

import os
import re

import pytest

from ckptman.checkpointer import Checkpointer
from ckptman.cli.app import main
from ckptman.jobs.chain_record import Chain, Spec
from ckptman.policies.save_policies import EverySteps
from ckptman.runtime.outcome import read_outcome
from ckptman.storage.format.paths import outcome_path, run_folder, step_folder
from tests.helpers.apps import App
from tests.helpers.ranks import say, start_ranks


def train(root, chain=None):
    if chain is not None:
        os.environ["CKPTMAN_CHAIN"] = chain
    app = App((2,))
    with Checkpointer(root, app.state, save_policy=EverySteps(10**9), signals=False) as checkpointer:
        step = checkpointer.restore()
        say("trains")
        while not checkpointer.should_stop():
            step += 1
            app.train_step()
            checkpointer.step(step)
    return step, checkpointer.exit_code


@pytest.fixture
def ask(tmp_path, capsys):
    """Ask the run, wait, and return the step of the answer."""

    def ask(what, answer):
        assert main(["ask", str(tmp_path / "run"), what, "--wait", "--timeout", "4min"]) == 0
        return int(re.search(rf"^{answer} step (\d+)\.$", capsys.readouterr().out, re.MULTILINE)[1])

    return ask


def test_save_then_stop_then_the_next_attempt(tmp_path, ask):
    root, before = tmp_path / "run", 0
    for _ in range(2):
        with start_ranks(2, train, str(root)) as world:
            world.await_message(0, "trains")
            saved = [ask("save", "Saved") for _ in range(2)]
            assert before < saved[0] < saved[1]
            assert all((root / step_folder(step) / "manifest.json").exists() for step in saved)
            before = ask("stop", "Stopped after")
            assert world.results() == [(before, 75)] * 2
        outcome = read_outcome(outcome_path(root))
        assert (outcome.state, outcome.step, outcome.reason) == ("stopped", before, "ckptman ask stop")
        assert (root / step_folder(before) / "manifest.json").exists()
    assert not [each for each in run_folder(root).iterdir() if each.name.startswith("ask-")]


def test_hold_pauses_the_chain_first(tmp_path, ask):
    folder = tmp_path / "chain"
    folder.mkdir()
    chain = Chain(folder)
    chain.start_local(Spec(script="train", interpreter=(), workdir="/", created_seconds=0.0))
    with start_ranks(2, train, str(tmp_path / "run"), str(folder)) as world:
        world.await_message(0, "trains")
        step = ask("hold", "Stopped after")
        assert chain.state.state == "paused"
        assert world.results() == [(step, 75)] * 2

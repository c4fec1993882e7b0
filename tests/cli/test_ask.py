"""`ckptman ask` where nobody is to answer: one clear line, and nothing left."""

import json
import threading

import pytest

from ckptman.checkpointer import Checkpointer
from ckptman.cli.status import _answer
from ckptman.errors import CkptmanError
from ckptman.jobs.chain_record import Chain, Spec
from ckptman.storage.catalog import liveness
from ckptman.storage.catalog.writer_lock import claim, read_owner
from ckptman.storage.format.paths import run_folder
from tests.helpers import unprivileged
from tests.helpers.ranks import say, start_ranks


def left(root):
    return [each for each in run_folder(root).iterdir() if each.name.startswith("ask-")]


def idle(root):
    """A run that never comes to the end of a step."""
    with Checkpointer(root, {"step": 0}) as checkpointer:
        checkpointer.restore()
        say("idle")
        threading.Event().wait()


@pytest.fixture
def run(tmp_path):
    with start_ranks(1, idle, str(tmp_path / "run"), alone=True) as world:
        world.await_message(0, "idle")
        yield tmp_path / "run", world


def test_a_root_in_which_nothing_trains(tmp_path, ends):
    root = tmp_path / "run"
    with Checkpointer(root, {"step": 0}):
        pass
    for what in ("save", "stop", "hold"):
        assert "no run is training in" in ends(3, "ask", root, what, "--wait").err
    held = claim(root, "another", None)  # as a rollback has it
    try:
        assert "no run is training in" in ends(3, "ask", root, "stop").err
    finally:
        held.release()
    assert not left(root)


def test_no_answer_in_time(run, ends):
    said = ends(1, "ask", run[0], "save", "--wait", "--timeout", "0.01s")
    assert "to save at its next step" in said.out
    assert "no answer within" in said.err


@pytest.mark.parametrize("is_here", [True, False])
def test_a_run_that_is_killed_before_it_answers(run, monkeypatch, is_here):
    root, world = run
    owner = read_owner(root)
    if not is_here:  # on another machine: that its claim is no longer touched is all that can be seen
        monkeypatch.setattr(liveness, "_host_key", lambda: "another machine")
        monkeypatch.setattr(liveness, "SILENT_SECONDS", 0.3)
    world.kill(0)
    world.join()
    with pytest.raises(CkptmanError, match="ended before it carried out"):
        _answer(root, "0a1b2c3d", owner, 240.0)


def test_somebody_without_rights(run):
    root, _ = run
    run_folder(root).chmod(0o500)
    try:
        said = unprivileged.ckptman("ask", root, "stop")
    finally:
        run_folder(root).chmod(0o700)
    assert said.returncode == 10
    (line,) = said.stderr.splitlines()
    assert line.startswith(f"Error: the checkpoint root {root} cannot be written (Permission denied): check")
    assert not left(root)


def test_a_chain_that_has_ended_cannot_be_held(tmp_path, ends, monkeypatch):
    chain = Chain(tmp_path)
    chain.start_local(Spec(script="train", interpreter=(), workdir="/", created_seconds=0.0))
    monkeypatch.setenv("CKPTMAN_CHAIN", str(tmp_path))
    with Checkpointer(tmp_path / "run", {"step": 0}):
        chain.turn("cancelled", "cancelled by somebody", 0.0)
        assert "the chain is cancelled (cancelled by somebody)" in ends(2, "ask", tmp_path / "run", "hold").err
        assert not left(tmp_path / "run")
    assert json.loads((tmp_path / "state.json").read_text())["state"] == "cancelled"

"""A mount that changes at any operation of a run: one sentence, nothing lost, nothing written below it."""

import itertools
import os
import subprocess
import warnings

import pytest
import torch

import ckptman
from ckptman.checkpointer import Checkpointer
from ckptman.errors import CkptmanError
from tests.helpers.other_client import other_client

WAYS = ("away", "read only", "unmounted", "other clock")
pytestmark = [pytest.mark.campaign, pytest.mark.timeout(3000)]


def state_of(step):
    return {"model": {"weight": torch.full((50,), float(step))}, "step": step}


class Scene:
    """A run on a mount, and the folder on the disk that it shows."""

    def __init__(self, folder, client):
        self.disk, self.client, self.root = folder, client, client.path / "run"

    def come_back(self, way):
        """Have the mount be as it was; one that was detached comes back as another device."""
        self.client.turn(way, on=False)
        if not os.path.ismount(self.client.path):
            below = list(self.client.path.iterdir())
            subprocess.run(["mount", "--bind", self.disk, self.client.path], check=True)
            assert below == [], "nothing was written below the mount point"


def save(root, step):
    """Save a step in a run that goes on from what there is. Returns what it went on from."""
    state = state_of(0)
    with Checkpointer(root, state, async_save=False, watchdog=None) as checkpointer:
        begun = checkpointer.restore()
        assert state["step"] == begun, "what is loaded is what was saved"
        assert begun == 0 or state["model"]["weight"].eq(float(begun)).all()
        state.update(state_of(step))
        checkpointer.save(step)
    return begun


@pytest.mark.parametrize("way", WAYS)
def test_a_mount_that_changes(tmp_path, way):
    warnings.simplefilter("ignore")  # of what could not be written beside the checkpoint
    for number in itertools.count(1):
        folder = tmp_path / f"disk-{number}"
        folder.mkdir()
        with other_client(folder, tmp_path / f"mount-{number}") as client:
            scene = Scene(folder, client)
            assert save(scene.root, 1) == 0
            client.turn(way, at=number)
            told = None
            try:
                assert save(scene.root, 2) == 1, "never from the beginning"
            except CkptmanError as error:
                told = str(error)
                assert "\n" not in told
            had_come = client.has_come(way)
            scene.come_back(way)
            newest = ckptman.read(folder / "run")["step"]
            assert newest == 2 if told is None else newest in (1, 2)
            assert save(scene.root, 3) == newest
            assert ckptman.verify(folder / "run").good
        if not had_come:
            break

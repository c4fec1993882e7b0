"""Roots that others wrote: the verbs say what is there and how far they go with it, and change nothing."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptman
from ckptman.cli.app import main
from ckptman.errors import NotFoundError
from tests.helpers.checkpoints import commit

pytestmark = pytest.mark.usefixtures("forked")

LIGHTNING = "epoch=0-step=5.ckpt"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("written")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is saved by one process
        dcp.save({"w": torch.ones(300), "train": {"step": 3}}, checkpoint_id=root / "step-3", no_dist=True)
    torch.save({"state_dict": {"w": torch.ones(300)}, "global_step": 5}, root / LIGHTNING)
    trainer = root / "checkpoint-500"
    trainer.mkdir()
    (trainer / "model.safetensors").write_bytes(bytes(1200))
    torch.save({"state": {0: torch.ones(300)}}, trainer / "optimizer.pt")
    (trainer / "merges.txt").write_text("a b")
    (trainer / "trainer_state.json").write_text(json.dumps({"global_step": 500}))
    return root


@pytest.fixture
def root(written, tmp_path):
    return Path(shutil.copytree(written, tmp_path / "root"))


def _files(root):
    return {str(each): each.stat().st_mtime_ns for each in root.rglob("*")}


def test_list_shows_them_apart_from_what_counts(root, ends):
    commit(root, 7)
    told = json.loads(ends(0, "list", root, "--json").out)["foreign"]
    writers = {3: "torchtitan", 5: "Lightning", 500: "the HF Trainer"}
    assert {each["step"]: each["writer"] for each in told} == writers
    assert told[1]["bytes"] == (root / LIGHTNING).stat().st_size


def test_verify_checks_plain_dcp_and_says_whose_the_others_are(root, ends):
    before = _files(root)
    lines = ends(0, "verify", root, "--all").out.splitlines()
    assert any(line.startswith(f"{root}/step-3: written by torchtitan, without digests: ") for line in lines)
    for name, writer in ((LIGHTNING, "Lightning"), ("checkpoint-500", "the HF Trainer")):
        why = f"it is a checkpoint of {writer}, which ckptman cannot check: load it with {writer}"
        assert f"{root}/{name}: not checked, {why}" in lines
        assert f"{root}/{name}: {why}" in ends(3, "verify", root / name, "--world-size", "2").err
    assert ends(3, "verify", root).out.startswith(f"{root}/checkpoint-500: not checked, ")
    assert _files(root) == before


def test_a_root_in_which_the_trainer_left_its_state_and_final_model_is_a_root(root, capsys, ends):
    for name in ("trainer_state.json", "model.safetensors"):
        shutil.copy(root / "checkpoint-500" / name, root)
    commit(root, 7)
    assert [line for line in ends(0, "verify", root, "--all").out.splitlines() if line.startswith(f"{root}: ")] == []
    assert f"{root}/step-3 -> {root}/step-0000000003: step 3; " in ends(2, "adopt", root).out


def test_what_lies_beside_plain_dcp_is_not_read(root, ends):
    sharded = (root / "step-3").rename(root / "epoch=1-step=9.ckpt")
    (sharded / "meta.pt").write_bytes(b"")
    assert "  remark: not proved: meta.pt, which DCP does not read\n" in ends(0, "verify", sharded).out


def test_dcp_that_was_not_saved_to_its_end_is_told_as_that(root, capsys):
    (root / "step-3" / ".metadata").unlink()
    for verb, code in (("verify", 4), ("adopt", 3)):
        assert main([verb, str(root / "step-3")]) == code
        assert ".metadata" in (told := capsys.readouterr().err)
        assert "DCP writes" in told


def test_verify_of_a_step_that_is_not_there_tells_those_of_other_programs(root, capsys):
    assert main(["verify", str(root), "--step", "77"]) == 3
    assert "no checkpoint of step 77; the steps of other programs there: 3, 5, 500" in capsys.readouterr().err


def test_what_diffusers_saved_by_accelerate_is_known(root, ends):
    (root / "checkpoint-900").mkdir()
    (root / "checkpoint-900" / "random_states_0.pkl").touch()
    assert "checkpoint-900       Accelerate, no digests" in ends(0, "list", root).out
    assert "checkpoint-900: it is a checkpoint of Accelerate, which" in ends(3, "verify", root).err


def test_prune_deletes_none_of_them_and_says_so(root, ends):
    before = _files(root)
    assert ends(0, "prune", root, "--keep-last", "1").out.splitlines()[-1] == (
        "3 checkpoints of other programs, such as checkpoint-500 of the HF Trainer: no rule deletes them; "
        "ckptman adopt hands those of plain DCP to the rules."
    )
    assert _files(root) == before


def test_adopt_takes_plain_dcp_and_says_of_the_others_what_to_do(root, ends):
    told = ends(2, "adopt", root)
    assert f"{root}/step-3 -> {root}/step-0000000003: step 3; " in told.out
    for name, writer in ((LIGHTNING, "Lightning"), ("checkpoint-500", "the HF Trainer")):
        assert f"{root}/{name} is a checkpoint of {writer}, and only those of plain DCP are adopted" in told.err
    assert "ckptman.save(state, 'step-0000000500')" in told.err
    assert "Load it by the HF Trainer" in ends(2, "adopt", root / "checkpoint-500").err
    assert [each.step for each in ckptman.Run(root).checkpoints] == [3]


@pytest.mark.parametrize("name", [LIGHTNING, "checkpoint-500"])
def test_a_run_does_not_start_at_0_beside_them(root, name):
    for each in root.iterdir():
        if each.name != name:
            shutil.rmtree(each) if each.is_dir() else each.unlink()
    before = _files(root / name)
    with (
        pytest.raises(ckptman.ConfigError, match=r"nothing is started at 0 there\. Name another root, or resume by"),
        ckptman.Checkpointer(root, {"w": torch.zeros(3)}) as checkpointer,
    ):
        checkpointer.restore()
    assert _files(root / name) == before


def test_weights_that_somebody_put_into_the_root_do_not_stop_a_run(root):
    for name in ("step-3", "checkpoint-500"):
        shutil.rmtree(root / name)
    (root / LIGHTNING).rename(root / "sd-v1-5.ckpt")
    with ckptman.Checkpointer(root, {"w": torch.zeros(3)}) as checkpointer:
        assert checkpointer.restore() == 0


@pytest.mark.parametrize("verb", ["show", "diff", "export", "copy"])
@pytest.mark.parametrize("name", ["checkpoint-500", LIGHTNING])
def test_verbs_that_load_say_whose_checkpoint_it_is(root, verb, name, capsys):
    more = [str(root / "out")] if verb in ("export", "copy") else []
    assert main([verb, str(root / name), *more]) == 3
    writer = "Lightning" if name == LIGHTNING else "the HF Trainer"
    assert f"{root / name} is a checkpoint of {writer}" in capsys.readouterr().err
    with pytest.raises(NotFoundError, match=f"is a checkpoint of {writer}, .* save what you loaded with"):
        ckptman.load({"weight": torch.ones(1)}, root / name)

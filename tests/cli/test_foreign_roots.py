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
from ckptman.storage.format import safetensors
from tests.helpers.checkpoints import commit

pytestmark = pytest.mark.usefixtures("forked")

LIGHTNING = "epoch=0-step=5.ckpt"
WEIGHTS = "checkpoint-500/model.safetensors"
TRAINER_STATE = "checkpoint-500/trainer_state.json"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("written")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is saved by one process
        dcp.save({"w": torch.ones(300), "train": {"step": 3}}, checkpoint_id=root / "step-3", no_dist=True)
    torch.save({"state_dict": {"w": torch.ones(300)}, "global_step": 5}, root / LIGHTNING)
    trainer = root / "checkpoint-500"
    trainer.mkdir()
    head, _ = safetensors.lay_out([safetensors.Tensor("w", "float32", (300,))])
    (trainer / "model.safetensors").write_bytes(head + bytes(1200))
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
    lines = ends(0, "list", root).out.splitlines()
    assert "1 complete checkpoint, " in lines[3]
    assert [line.split()[0] for line in lines[6:9]] == ["3", "5", "500"]
    assert lines[6].endswith("step-3               torchtitan, no digests")
    assert lines[7].endswith(f"{LIGHTNING}  Lightning, no digests")
    assert lines[8].endswith("checkpoint-500       the HF Trainer, no digests")
    assert lines[9].startswith("3 checkpoints of other programs, which no restore takes from here and no prune deletes")
    told = json.loads(ends(0, "list", root, "--json").out)["foreign"]
    writers = {3: "torchtitan", 5: "Lightning", 500: "the HF Trainer"}
    assert {each["step"]: each["writer"] for each in told} == writers
    assert told[1]["bytes"] == (root / LIGHTNING).stat().st_size


def test_verify_says_for_each_what_was_compared_and_what_not(root, capsys, ends):
    before = _files(root)
    out = ends(0, "verify", root, "--all").out
    assert f"{root}/step-3: written by torchtitan, without digests: " in out
    assert "; 2 files, " in out
    assert f"{root}/{LIGHTNING}: written by Lightning, without digests: 1." in out
    assert f"{root}/checkpoint-500: written by the HF Trainer, without digests: 1." in out
    assert "checkpoint-500/model.safetensors: its elements have no checksum" in out
    assert "nobody looked into checkpoint-500/merges.txt" in out
    assert "digests   torchtitan and Lightning and the HF Trainer keep none" in out
    assert ends(0, "verify", root).out.startswith(f"{root}/checkpoint-500: ")
    assert "coverage" not in ends(0, "verify", root, "--step", "5").out
    assert main(["verify", str(root), "--world-size", "1"]) == 2
    assert "is a checkpoint of the HF Trainer, which ckptman does not load" in capsys.readouterr().err
    assert _files(root) == before


def _flipped(data):
    data = bytearray(data)
    data[data.index(torch.ones(9).numpy().tobytes())] ^= 1
    return data


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        (LIGHTNING, lambda data: data[:-100], "is not a container that torch.load reads"),
        (LIGHTNING, lambda data: b"PK", "is not a container that torch.load reads"),
        (LIGHTNING, lambda data: b"", "it is empty"),
        (LIGHTNING, _flipped, "does not match its checksum"),
        ("checkpoint-500/optimizer.pt", lambda data: b"", "optimizer.pt: it is empty"),
        ("checkpoint-500/optimizer.pt", lambda data: bytes(2000), "it begins with zeros"),
        ("checkpoint-500/optimizer.pt", _flipped, "does not match its checksum"),
        ("checkpoint-500/__0_0.distcp", lambda data: b"x", "there is no .metadata beside it"),
        (WEIGHTS, lambda data: data[:-4], "it has 1196 bytes of elements, and its header tells of 1200"),
        (WEIGHTS, lambda data: b"", "and no header of safetensors"),
        (f"{WEIGHTS}.index.json", lambda data: b'{"weight_map": {"w": "x-1.safetensors"}}', "missing: x-1.safetensors"),
        (TRAINER_STATE, lambda data: b'{"glob', "it cannot be read"),
        (TRAINER_STATE, lambda data: None, "trainer_state.json is missing"),
        (TRAINER_STATE, lambda data: b'{"global_step": 400}', "is of step 400, and its name of step 500"),
    ],
)
def test_damage_is_found(root, ends, name, change, why):
    path = root / name
    changed = change(path.read_bytes() if path.exists() else b"")
    path.unlink() if changed is None else path.write_bytes(changed)
    assert why in ends(4, "verify", str(root / name.partition("/")[0])).out


def test_a_root_in_which_the_trainer_left_its_state_and_final_model_is_a_root(root, capsys, ends):
    for name in ("trainer_state.json", "model.safetensors"):
        shutil.copy(root / "checkpoint-500" / name, root)
    commit(root, 7)
    assert [line for line in ends(0, "verify", root, "--all").out.splitlines() if line.startswith(f"{root}: ")] == []
    assert f"{root}/step-3 -> {root}/step-0000000003: step 3; " in ends(2, "adopt", root).out
    shutil.copytree(root / "step-0000000003", root / "checkpoint-500" / "mine")
    assert main(["verify", str(root / "checkpoint-500")]) == 0
    assert f"nobody looked into {root}/checkpoint-500/mine, a checkpoint of ckptman" in capsys.readouterr().out


def test_what_lies_beside_plain_dcp_is_checked_too(root, ends):
    sharded = (root / "step-3").rename(root / "epoch=1-step=9.ckpt")
    torch.save({"global_step": 9}, sharded / "meta.pt")
    (sharded / "notes.txt").write_text("x")
    out = ends(0, "verify", sharded).out
    assert "; 4 files, " in out
    assert f"not proved: nobody looked into {sharded.name}/notes.txt" in out
    (sharded / "meta.pt").write_bytes(b"")
    assert f"{sharded.name}/meta.pt: it is empty" in ends(4, "verify", sharded).out


def test_dcp_that_was_not_saved_to_its_end_is_told_as_that(root, capsys):
    (root / "step-3" / ".metadata").unlink()
    for verb, code in (("verify", 4), ("adopt", 3)):
        assert main([verb, str(root / "step-3")]) == code
        assert ".metadata" in (told := capsys.readouterr().err)
        assert "DCP writes" in told


def test_verify_of_a_step_that_is_not_there_tells_those_of_other_programs(root, capsys):
    assert main(["verify", str(root), "--step", "77"]) == 3
    assert "no checkpoint of step 77; the steps of other programs there: 3, 5, 500" in capsys.readouterr().err


@pytest.fixture
def accelerate(root):
    """What diffusers leaves by Accelerate: a folder for each model, or the weights of a LoRA."""
    folder = root / "checkpoint-900"
    (folder / "unet").mkdir(parents=True)
    for name in ("unet/diffusion_pytorch_model.safetensors", "pytorch_lora_weights.safetensors"):
        shutil.copy(root / "checkpoint-500" / "model.safetensors", folder / name)
    (folder / "unet" / "config.json").write_text("{}")
    for name in ("optimizer.bin", "scheduler.bin", "random_states_0.pkl"):
        torch.save({"state": {0: torch.ones(300)}}, folder / name)
    return folder


def test_what_diffusers_saved_by_accelerate_is_whole(accelerate, root, ends):
    assert "checkpoint-900       Accelerate, no digests" in ends(0, "list", root).out
    out = ends(0, "verify", root).out
    assert out.startswith(f"{accelerate}: written by Accelerate, without digests: ")
    assert "nobody looked into" not in out
    assert "not proved: that no file is missing, as Accelerate keeps no list of them" in out
    path = accelerate / "optimizer.bin"
    path.write_bytes(_flipped(path.read_bytes()))
    assert "checkpoint-900/optimizer.bin: does not match its checksum" in ends(4, "verify", root).out
    (accelerate / "random_states_0.pkl").unlink()
    assert "random_states_0.pkl of Accelerate: it was not saved to its end" in ends(4, "verify", root).out


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

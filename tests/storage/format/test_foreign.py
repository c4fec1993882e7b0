"""Checkpoints of others are known by their names and their files."""

import pytest

from ckptman.storage.format.foreign import foreign_in, recognize, step_in
from ckptman.storage.format.paths import MANIFEST, METADATA


@pytest.mark.parametrize(
    ("name", "step"),
    [
        *(("step-1000", 1000), ("step_7", 7), ("global_step7", 7), ("iter_0001000", 1000), ("iteration-3", 3)),
        *(("checkpoint-500", 500), ("ckpt5", 5), ("run2-step-9", 9), ("step-0000000004", 4)),
        *(("epoch=0-step=5.ckpt", 5), ("step=7-val_loss=0.31-v2.ckpt", 7), ("best-epoch=1-step=20-v1.ckpt", 20)),
        *(("epoch-3", None), ("final", None), ("7", None), ("footstep-3", None), ("step-3.old", None)),
        *(("last.ckpt", None), ("epoch=3-val_loss=0.5.ckpt", None), ("global_step=5.ckpt", None)),
        *(("step-0000000004.tmp-x", None), ("step-", None), ("step-٣", None)),
    ],
)
def test_the_step_that_a_name_tells(name, step):
    assert step_in(name) == step


@pytest.mark.parametrize(
    ("files", "writer", "is_dcp"),
    [
        (("step-5/.metadata",), "torchtitan", True),
        (("iter_10/.metadata",), "plain DCP", True),
        (("checkpoint-5/trainer_state.json",), "the HF Trainer", False),
        (("checkpoint-5/model.safetensors",), "the HF Trainer", False),
        (("best/trainer_state.json", "best/model.safetensors"), "the HF Trainer", False),
        (("best/trainer_state.json", "best/global_step5/mp_rank_00_model_states.pt"), "the HF Trainer", False),
        (("out/trainer_state.json", "out/tokenizer.json"), None, None),
        (("out/trainer_state.json", "out/model.safetensors", "out/checkpoint-5/trainer_state.json"), None, None),
        (("out/trainer_state.json", "out/model.safetensors", "out/step-0000000005/manifest.json"), None, None),
        (("checkpoint-5/random_states_0.pkl", "checkpoint-5/optimizer.bin"), "Accelerate", False),
        (("checkpoint-5/random_states_0.pkl", "checkpoint-5/trainer_state.json"), "the HF Trainer", False),
        (("checkpoint_0/random_states_0.pkl",), "Accelerate", False),
        (("checkpoint-5/pytorch_model_fsdp_0/.metadata",), "the HF Trainer", False),
        (("checkpoint-5/.metadata",), "plain DCP", True),
        (("last.ckpt",), "Lightning", False),
        (("epoch=0-step=5.ckpt/.metadata", "epoch=0-step=5.ckpt/meta.pt"), "Lightning", True),
        (("step-5/weights.bin",), None, None),
        (("notes.txt",), None, None),
        (("step-5/.metadata", "step-5/manifest.json"), None, None),
        (("step-0000000005/.metadata",), None, None),
        (("checkpoint-5",), None, None),
        (("checkpoint-5/.ckptman/run", "checkpoint-5/step-0000000005/manifest.json"), None, None),
        (("runs.ckpt/step-0000000005/manifest.json",), None, None),
    ],
)
def test_who_wrote_it(tmp_path, files, writer, is_dcp):
    for each in files:
        (tmp_path / each).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / each).write_bytes(b"")
    found = recognize(tmp_path / files[0].partition("/")[0])
    assert (found and found.writer, found and found.is_dcp) == (writer, is_dcp)


@pytest.mark.parametrize(
    ("name", "is_of_a_run"),
    [
        *(("epoch=0-step=5.ckpt", True), ("best-epoch=3-val_loss=0.5.ckpt", True), ("step=7-v2.ckpt", True)),
        *(("last.ckpt", True), ("last-v1.ckpt", True), ("model_epoch=3.ckpt", True)),
        *(("hpc_ckpt_1.ckpt", True), ("on_exception.ckpt", True)),
        *(("sd-v1-5.ckpt", False), ("model.ckpt", False), ("lastly.ckpt", False), ("onestep=5.ckpt", False)),
    ],
)
def test_which_files_a_run_of_lightning_goes_on_from(tmp_path, name, is_of_a_run):
    (tmp_path / name).write_bytes(b"")
    found = recognize(tmp_path / name)
    assert found.is_of_a_run is is_of_a_run


def test_those_of_a_root_come_by_step_and_a_link_to_one_is_not_another(tmp_path):
    for name in ("step-20", "step-3", "final"):
        (tmp_path / name).mkdir()
        (tmp_path / name / METADATA).write_bytes(b"")
    (tmp_path / "latest").symlink_to("step-20")
    (tmp_path / "last.ckpt").symlink_to("nowhere")
    (tmp_path / "step-0000000001").mkdir()
    (tmp_path / "step-0000000001" / MANIFEST).write_bytes(b"")
    found = foreign_in(tmp_path, (each.name for each in tmp_path.iterdir()))
    assert [each.path.name for each in found] == ["final", "step-3", "step-20"]

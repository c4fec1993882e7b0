import re
import shutil

import pytest

from ckptman.cli.app import main
from ckptman.cli.show import VALUES_SHOWN, sharding, tensor_facts
from tests.helpers.checkpoints import commit


def test_the_origin_and_how_tensors_were_cut_are_shown(tmp_path, ends):
    commit(tmp_path, 100)
    commit(tmp_path, 200, ranks=4, restored_from=100, metrics={"loss": 0.25}, values={"data": {"seen": {1, 2}}})
    ends(0, "verify", tmp_path)
    out = ends(0, "show", tmp_path).out
    shown = ("4, mesh shard 4", "loss=0.25", "run-of-a-test, attempt 1, job 4711", "restored from  step 100")
    for each in (*shown, "model.weight  [8, 4]  float32  4 shards along dim 0  128 B", "data.seen  {1, 2}"):
        assert each in out
    assert re.search(r"  verified       \d+ s ago\n", out)


def test_a_step_or_a_folder_of_any_name_can_be_named(tmp_path, ends):
    commit(tmp_path, 100)
    commit(tmp_path, 200)
    shutil.copytree(tmp_path / "step-0000000100", tmp_path / "final")
    for arguments in (["", "--step", "100"], ["step-0000000100"], ["final"]):
        assert ends(0, "show", str(tmp_path / arguments[0]), *arguments[1:]).out.startswith("Step 100: ")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("step-0000000999", "its manifest is of step 100"),
        ("step-0000000100.tmp-abcdef00-1", "it was never committed"),
        ("step-0000000100.trash-abcdef00-1", "it was deleted"),
    ],
)
def test_a_folder_that_does_not_count_in_a_root_does_not_count_alone(name, why, tmp_path, ends):
    commit(tmp_path, 100).path.rename(tmp_path / name)
    assert why in ends(4, "show", str(tmp_path / name)).err
    assert main(["verify", str(tmp_path / name)]) == 4


def test_many_values_of_one_object_are_cut(tmp_path, ends):
    commit(tmp_path, 1, values={"optimizer": {f"lr.{i:03d}": i / 10 for i in range(100)}})
    out = ends(0, "show", tmp_path).out
    assert "100 plain values" in out
    assert f"... {100 - VALUES_SHOWN} more: --json shows all" in out


@pytest.mark.parametrize(
    ("shape", "boxes", "words"),
    [
        ((), [((), ())], "whole"),
        ((4,), [((0,), (4,))], "whole"),
        ((4,), [((0,), (2,)), ((2,), (2,))], "2 shards along dim 0"),
        ((4, 4), [((0, 0), (4, 2)), ((0, 2), (4, 2))], "2 shards along dim 1"),
        ((4, 4), [((i, j), (2, 2)) for i in (0, 2) for j in (0, 2)], "2 x 2 shards along dims 0, 1"),
        ((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 2)), ((2, 2), (2, 2))], "3 chunks"),
        ((0, 4), [], "0 chunks"),
    ],
)
def test_sharding_in_words(shape, boxes, words):
    assert sharding(shape, boxes) == words


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 30), ("float8_e4m3fn", 15), ("complex128", 240)])
def test_bytes_are_those_of_the_elements(dtype, size):
    assert tensor_facts("x", (3, 5), dtype, []).bytes == size

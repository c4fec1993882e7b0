"""`ckptman diff`: what differs is found and measured, however both were saved; what is damaged is not compared."""

import json
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckptman
from ckptman.cli.app import main
from ckptman.engine.loading.box_reader import BoundedState, boxes
from ckptman.storage.format.paths import step_folder
from tests.engine.dcp.test_values import WRITERS, bits, noise
from tests.engine.dcp.test_values import save as save_as
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")
DATA = "__0_0.distcp"


def save(path, state, writer="ckptman.save"):
    save_as(state, path, writer)
    return path


def pair(folder, before, after):
    return save(folder / "a", before), save(folder / "b", after)


class Diff:
    """Runs the command: `data` is its JSON, `error` its error message."""

    def __init__(self, capsys):
        self._capsys = capsys
        self.data, self.error = {}, ""

    def __call__(self, *arguments):
        self._words = ["diff", *map(str, arguments)]
        self._code = main([*self._words, "--json"])
        out, self.error = self._capsys.readouterr()
        self.data = json.loads(out) if self._code in (0, 1) else {}
        return self._code

    @property
    def told(self):
        """The report for people."""
        assert main(self._words) == self._code
        told = self._capsys.readouterr()
        assert told.err == self.error
        return told.out

    def kinds(self, what="tensors"):
        return {each["name"]: each["kind"] for each in self.data[what]}

    def __getitem__(self, name):
        return next(each for what in ("tensors", "values") for each in self.data[what] if each["name"] == name)


@pytest.fixture
def diff(capsys):
    return Diff(capsys)


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "model": {name: torch.randn(size, 3, generator=generator) for name, size in (("large", 90_000), ("small", 5))},
        "optimizer": {"lr": 0.1, "step": 7, "betas": (0.9, 0.99)},
        "epoch": 3,
    }


def test_the_same_is_0_and_something_else_is_1(tmp_path, diff):
    after = tensors()
    after["model"]["large"][70_000] += 0.5
    a, b = pair(tmp_path, tensors(), after)
    assert diff(a, save(tmp_path / "again", tensors())) == 0
    assert diff.data["same"] is True
    assert "no difference in 2 tensors and 4 plain values (2 tensors by digest: --read reads them)" in diff.told
    assert diff(a, a, "--read") == 0
    assert diff.data["unread_tensors"] == 0
    assert diff(a, b) == 1
    assert diff.kinds() == {"model.large": "changed"}
    found = diff["model.large"]
    assert (found["elements"], found["changed"], found["max_abs"]) == (270_000, 3, pytest.approx(0.5))
    norm = float(tensors()["model"]["large"].double().norm())
    assert found["relative_norm"] == pytest.approx(math.sqrt(0.75) / norm, rel=1e-6)
    assert diff.data["groups"]["model"]["tensors"] == {"changed": 1, "same": 1}
    told = diff.told
    assert "1 tensor and 0 plain values differ, of 2 tensors and 4 plain values" in told
    assert "model.large  changed  [90000, 3]  float32" in told
    assert "3 of 270,000" in told


def test_each_kind_of_difference_of_tensors(tmp_path, diff):
    exact, nans, more_nans = torch.tensor([1.0, 1.0 + 2**-20]), torch.ones(40, 4), torch.ones(40, 4)
    nans[0, 0] = math.nan
    more_nans[3], more_nans[5, 1] = math.nan, math.inf
    before = {"gone": torch.ones(2), "wide": torch.ones(2, 6), "exact": exact, "nans": nans, "none": torch.empty(0)}
    after = {"new": torch.ones(3), "wide": torch.ones(3, 4), "exact": exact.bfloat16(), "nans": more_nans}
    a = {"x": before | {"scalar": torch.tensor(1.5), "empty": torch.empty(3, 0, 2)}, "lr": torch.tensor(0.1)}
    b = {
        "x": after | {"scalar": torch.tensor(9.5), "empty": torch.empty(3, 0, 2), "none": torch.empty(0, 4)},
        "lr": 0.1,
    }
    assert diff(*pair(tmp_path, a, b), "--read") == 1
    assert list(diff.kinds().items()) == [
        ("lr", "removed"),
        ("x.gone", "removed"),
        ("x.new", "added"),
        ("x.none", "reshaped"),
        ("x.wide", "reshaped"),
        ("x.exact", "retyped"),
        ("x.nans", "changed"),  # first, because it cannot be measured
        ("x.scalar", "changed"),
    ]
    assert diff.kinds("values") == {"lr": "added"}
    assert (diff["x.exact"]["changed"], diff["x.exact"]["max_abs"]) == (1, 2**-20)
    assert diff["x.wide"]["a"] == {"shape": [2, 6], "dtype": "float32"}
    assert diff["x.wide"]["b"]["shape"] == [3, 4]
    assert "b" not in diff["x.gone"]
    assert (diff["x.nans"]["nan"], diff["x.nans"]["inf"], diff["x.nans"]["not_finite"]) == ([1, 4], [0, 1], 6)
    assert (diff["x.nans"]["max_abs"], diff["x.scalar"]["max_abs"]) == (0, 8)
    told = diff.told
    lines = [line.split() for line in told.splitlines()]
    assert ["x.wide", "reshaped", "[2,", "6]", "->", "[3,", "4]", "float32", "-", "-", "-"] in lines
    assert ["x.gone", "only", "in", "A", "[2]", "float32", "-", "-", "-"] in lines
    assert "float32 -> bfloat16" in told
    assert "NaN: 1 -> 4; Inf: 0 -> 1; 6 not finite" in told


def test_plain_values_side_by_side(tmp_path, diff):
    same = {"nan": math.nan, "array": np.arange(3), "deep": [{"x": 1}, {"y": (1, [2, b"3"])}], "none": None}
    before = {**same, "lr": 0.1, "kind": 1, "zero": 0.0, "list": [1, 2], "gone": "x", "text": "a" * 500 + "b"}
    after = {**same, "lr": 0.05, "kind": True, "zero": -0.0, "list": [1, 3], "new": "y", "text": "a" * 500}
    assert diff(*pair(tmp_path, {"s": before}, {"s": after})) == 1
    changed = dict.fromkeys(("s.lr", "s.kind", "s.zero", "s.list", "s.text"), "changed")
    assert diff.kinds("values") == {**changed, "s.gone": "removed", "s.new": "added"}
    assert (diff["s.lr"]["a"], diff["s.lr"]["b"]) == (0.1, 0.05)
    assert "a" not in diff["s.new"]
    assert diff["s.text"]["a"] == "a" * 500 + "b"
    told = diff.told.splitlines()
    assert ["s.gone", "'x'", "-"] in [line.split() for line in told]
    (row,) = [line for line in told if "s.text" in line]
    assert row.endswith("aab'  ...aaaaaaaaaaaa'"), "it is shown where it differs"


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated", "ignore:.*[Qq]uantiz")
def test_quantized_tensors_by_the_numbers_they_stand_for(tmp_path, diff):
    values = torch.linspace(-3, 3, 12).reshape(3, 4)
    scales, zeros = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64), torch.tensor([1, 2, 3])

    def state(shift):
        return {
            "q": torch.quantize_per_tensor(values + shift, 0.125, 3, torch.quint8),
            "channels": torch.quantize_per_channel(values + shift, scales, zeros, 0, torch.qint8),
            "n": shift,
        }

    a, b = pair(tmp_path, state(0), state(0.5))
    assert diff(a, b) == 1
    assert diff.kinds() == {"q": "changed", "channels": "changed"}
    assert diff["q"]["max_abs"] == 0.5
    assert diff(a, save(tmp_path / "c", state(0) | {"longer": "so that it lies elsewhere" * 9}), "--only", "q") == 0


# ---- layouts ---------------------------------------------------------------------------------------------------------


def whole(changed):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1003, 700, generator=generator)
    columns = torch.randn(130, 501, generator=generator).bfloat16()
    if changed:
        rows[777, 13] += 1
        columns[:, 400] *= 2
    return {"w": {"rows": rows, "columns": columns, "whole": torch.randn(17, generator=generator)}, "n": 1}


def save_sharded(path, changed):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = whole(changed)
    state["w"]["rows"] = distribute_tensor(state["w"]["rows"], mesh, [Shard(0)])
    state["w"]["columns"] = distribute_tensor(state["w"]["columns"], mesh, [Shard(1)])
    ckptman.save(state, path)


@pytest.mark.slow
def test_saved_by_one_rank_and_by_four(tmp_path, diff, monkeypatch):
    run_ranks(4, save_sharded, str(tmp_path / "same-4"), False)
    run_ranks(4, save_sharded, str(tmp_path / "other-4"), True)
    one = save(tmp_path / "same-1", whole(False))
    for piece in (None, 100_000):
        if piece:
            monkeypatch.setattr("ckptman.tools.diff.diff.PIECE_BYTES", piece)
        assert diff(one, tmp_path / "same-4") == 0
        assert diff.data["unread_tensors"] == 0, "other layouts have other digests"
        for a, b in ((one, "other-4"), (tmp_path / "same-4", "other-4"), (tmp_path / "other-4", "same-1")):
            assert diff(a, tmp_path / b) == 1
            assert diff.kinds() == {"w.rows": "changed", "w.columns": "changed"}
            assert diff["w.rows"]["changed"] == 1
            assert diff["w.columns"]["changed"] == 130
    norm = float(whole(True)["w"]["rows"].double().norm())
    assert diff["w.rows"]["relative_norm"] == pytest.approx(1 / norm, rel=1e-5)

    monkeypatch.setattr("ckptman.engine.loading.box_reader.KEPT_BYTES", 1)
    frugal = BoundedState.read(tmp_path / "same-4")
    assert all(frugal.digests(file) is not None for file in frugal.index.files)
    assert len(frugal._digests) == 1, "digests grow with a checkpoint"


@pytest.mark.parametrize("shape", [(), (7,), (3, 4, 5), (2, 1, 9, 3), (100, 1), (0, 3)])
@pytest.mark.parametrize("limit", [1, 5, 13, 1000])
def test_boxes_fill_a_tensor_exactly(shape, limit):
    found = torch.zeros(shape, dtype=torch.int64)
    for offsets, sizes in boxes(shape, limit):
        assert 0 < math.prod(sizes) <= limit
        box = found[tuple(slice(at, at + size) for at, size in zip(offsets, sizes))]
        assert box.shape == sizes
        assert torch.as_strided(found, sizes, found.stride(), box.storage_offset()).is_contiguous() or found.dim() == 0
        box += 1
    assert bool((found == 1).all())


def test_what_shares_a_block_with_something_else_is_the_same_without_being_read(tmp_path, diff):
    before = {"a": torch.ones(300_000), "b": torch.ones(300_001), "c": torch.ones(300_002)}
    after = before | {"b": torch.zeros(300_001)}
    assert diff(*pair(tmp_path, before, after)) == 1
    assert diff.kinds() == {"b": "changed"}
    assert diff.data["unread_tensors"] == 2
    # An element at either end lies in a block that it shares: its neighbour changes too here.
    for at in (0, 300_000):
        ends = dict(before, b=torch.zeros(300_001), a=before["a"].clone())
        ends["a"][-1 if at else 0] = 2
        assert diff(tmp_path / "a", save(tmp_path / f"ends-{at}", ends)) == 1
        assert diff.kinds() == {"a": "changed", "b": "changed"}
        assert diff["a"]["changed"] == 1


# ---- memory ----------------------------------------------------------------------------------------------------------

MEASURE = """
import contextlib, io, re, sys
from pathlib import Path
import torch
from ckptman.cli.app import main

def run(*arguments):
    with contextlib.redirect_stdout(io.StringIO()):
        return main(["diff", *arguments])

def peak_mib():  # not getrusage, which begins with the peak of the parent
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

assert run(sys.argv[1], sys.argv[2]) == 1
before = peak_mib()
assert run(sys.argv[3], sys.argv[4]) == 1
print(peak_mib() - before)
"""


@pytest.mark.slow
def test_memory_is_bounded_whatever_the_tensor(tmp_path):
    small = pair(tmp_path / "small", {"w": torch.ones(9)}, {"w": torch.zeros(9)})
    wide = torch.ones(1, 32 * 2**20), torch.ones(1, 32 * 2**20)
    wide[1][0, -1] = 2
    tall = torch.ones(2**21, 16), torch.zeros(2**21, 16)
    large = pair(tmp_path / "large", *({"w": w, "x": x} for w, x in zip(wide, tall)))
    command = [sys.executable, "-c", MEASURE, *map(str, (*small, *large))]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) < 160, "MiB, for two tensors of 128 MiB in each checkpoint"


# ---- other writers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(len(WRITERS)))
def test_checkpoints_of_all_writers_can_be_compared(tmp_path, diff, number):
    one, other = WRITERS[number], WRITERS[number - 1]
    after = tensors()
    after["model"]["small"][2, 1] += 4
    after["optimizer"]["lr"] = 0.2
    a, again = save(tmp_path / "a", tensors(), one), save(tmp_path / "again", tensors(), other)
    b = save(tmp_path / "b", after, other)
    assert diff(a, again) == 0
    assert diff(a, b) == 1
    assert diff.kinds() == {"model.small": "changed"}
    assert diff.kinds("values") == {"optimizer.lr": "changed"}
    assert diff["model.small"]["max_abs"] == pytest.approx(4)
    assert (diff["optimizer.lr"]["a"], diff["optimizer.lr"]["b"]) == (0.1, 0.2)
    assert ("written by plain DCP" in diff.told) == ("dcp" in (one, other))


class Own:
    """A class that no reader of a checkpoint knows."""

    def __init__(self, number):
        self.number = number


class Marked(torch.Tensor):
    """A tensor of a class of its own."""


@pytest.mark.parametrize("writer", WRITERS)
def test_what_only_its_own_program_can_load_is_compared_as_bytes(tmp_path, diff, writer):
    def state(number):
        values = {} if writer == "ckptman.save" else {"own": Own(number)}
        return {"t": torch.full((5,), float(number)).as_subclass(Marked), "w": torch.ones(3), **values}

    a, b = save(tmp_path / "a", state(1), writer), save(tmp_path / "b", state(2), writer)
    assert diff(a, save(tmp_path / "again", state(1), writer)) == 0
    assert diff(a, b) == 1
    assert diff.kinds() == {"t": "changed"}
    assert "only its bytes were compared" in diff.told
    assert diff["t"]["note"].endswith(f"{DATA}: t: it holds a tests.cli.test_diff.Marked, which is not loaded")
    if writer != "ckptman.save":
        assert diff.kinds("values") == {"own": "changed"}
        assert diff["own"]["a"] == "<it holds a tests.cli.test_diff.Own, which is not loaded>"


def test_one_that_cannot_be_loaded_leaves_its_neighbours_alone(tmp_path, diff):
    state = {"t": noise(torch.float32, 70_000), "u": noise(torch.float32, 70_000, 2), "v": noise(torch.int16, 9)}
    a, b = pair(tmp_path, state, state | {"t": state["t"].clone().as_subclass(Marked)})
    for order in ((a, b), (b, a)):
        assert diff(*order, "--read") == 1
        assert diff.kinds() == {"t": "changed"}


# ---- damage ----------------------------------------------------------------------------------------------------------


def flip_data(path):
    data = bytearray(path.read_bytes())
    data[data.index(bits(tensors()["model"]["large"]).numpy().tobytes()) + 1] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def change_dtype(path):
    path.write_bytes(path.read_bytes().replace(b"float32", b"float16"))


DAMAGES = [(DATA, flip_data), (DATA, cut), (DATA, Path.unlink), ("index.json", change_dtype), ("blocks-00000.bin", cut)]


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_a_damaged_checkpoint_is_4_and_names_the_file(tmp_path, diff, name, damage):
    after = tensors()
    after["model"]["large"] += 1
    bad, good = save(tmp_path / step_folder(1), tensors()), save(tmp_path / step_folder(2), tensors())
    other = save(tmp_path / step_folder(3), after)
    damage(bad / name)
    for order in ((bad, other), (other, bad)):
        assert diff(*order) == 4
        assert name in diff.error
        assert "What was to be filled" not in diff.error
    assert diff(bad, good, "--read") == 4


def test_bytes_that_changed_on_disk_are_seen_if_they_are_read(tmp_path, diff):
    a, b = pair(tmp_path, tensors(), tensors())
    flip_data(b / DATA)
    assert diff(a, b) == 0, "the digests are those of the save"
    assert diff.data["unread_tensors"] == 2
    assert diff(a, b, "--read") == 4


def test_a_compressed_checkpoint_is_not_read(tmp_path, diff):
    path = save(tmp_path / "a", tensors(), "dcp")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["stream.zstd"]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert diff(path, path, "--read") == 4
    assert "compressed" in diff.error


# ---- choosing and showing --------------------------------------------------------------------------------------------


def test_two_steps_of_a_root(tmp_path, diff):
    root = tmp_path / "run"
    for step in (10, 20, 30):
        save(root / step_folder(step), {"w": torch.full((3,), float(step))})
    for arguments, steps in (
        ([root, "--steps", "10,30"], (10, 30)),
        ([root], (20, 30)),
        ([root / step_folder(10), root], (10, 30)),
        ([root, root / step_folder(20)], (30, 20)),
    ):
        assert diff(*arguments) == 1
        assert (diff.data["a"]["step"], diff.data["b"]["step"]) == steps
        assert diff["w"]["max_abs"] == abs(steps[1] - steps[0])
        assert f"A: step {steps[0]}, " in diff.told


def test_only_some_names(tmp_path, diff):
    state = {"m": {f"{n}.{kind}": torch.ones(2) * n for n in range(3) for kind in ("weight", "bias")}, "lr": 1.0}
    other = {"m": {name: each + 1 for name, each in state["m"].items()}, "lr": 2.0}
    a, b = pair(tmp_path, state, other)
    assert diff(a, b, "--only", "m.*.bias") == 1
    assert diff.kinds() == {f"m.{n}.bias": "changed" for n in range(3)}
    assert diff.kinds("values") == {}
    assert diff(a, b, "--only", "m.0.*", "--only", "lr") == 1
    assert set(diff.kinds()) == {"m.0.weight", "m.0.bias"}
    assert diff.kinds("values") == {"lr": "changed"}


def test_the_largest_come_first_and_the_rest_is_counted(tmp_path, diff):
    before = {f"w{n:02}": torch.ones(4) for n in range(30)} | {"v": {str(n): n for n in range(30)}}
    after = {f"w{n:02}": torch.ones(4) * (1 + n) for n in range(30)} | {"v": {str(n): n + 1 for n in range(30)}}
    a, b = pair(tmp_path, before, after)
    assert diff(a, b) == 1
    assert list(diff.kinds()) == [f"w{n:02}" for n in range(29, 0, -1)]
    told = diff.told
    assert "w10 " in told
    assert "w09 " not in told.partition("tensor  ")[2]
    assert "... 9 more: --top 29, --all or --json shows all" in told
    assert "... 10 more: --top 30, --all or --json shows all" in told
    assert diff(a, b, "--all") == 1
    told = diff.told
    assert "more:" not in told
    assert all(f"  w{n:02} " in told for n in range(1, 30))

"""`ckptman export` and `adopt` as commands; what is hostile or odd on their way; two at a time."""

import json
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckptman
from ckptman.cli.app import main
from ckptman.storage.catalog.reader_lease import look
from ckptman.tools.adopt.adopt import adopt
from tests.helpers.checkpoints import flip_byte

pytestmark = [pytest.mark.usefixtures("forked"), pytest.mark.filterwarnings("ignore:.*in a single process")]


@pytest.fixture
def root(tmp_path):
    """A run with two checkpoints."""
    model = torch.nn.Linear(30, 20)
    with ckptman.Checkpointer(tmp_path / "run", {"model": model, "epoch": 1}) as checkpointer:
        for step in (1, 2):
            model.weight.data.fill_(step)
            checkpointer.save(step)
    return tmp_path / "run"


def weight_in(out):
    return float(load_file(out / "model.safetensors")["weight"][0, 0])


def test_of_a_root_it_is_the_newest_or_the_step(root, tmp_path, ends):
    told = ends(0, "export", root, tmp_path / "newest")
    assert told.out.startswith(f"{root}/step-0000000002 -> {tmp_path}/newest: 2 tensors, 2.4 KiB in 1 file\n")
    assert told.err == ""
    found = json.loads(ends(0, "export", root, tmp_path / "first", "--step", "1", "--json").out)
    facts = [found[each] for each in ("checkpoint", "path", "format", "tensors", "bytes")]
    assert facts == [f"{root}/step-0000000001", f"{tmp_path}/first", "safetensors", 2, 2480]
    assert (weight_in(tmp_path / "newest"), weight_in(tmp_path / "first")) == (2.0, 1.0)


def test_damage_is_4_and_names_the_tensor(root, tmp_path, ends):
    flip_byte(root / "step-0000000002" / "__0_0.distcp")
    told = ends(4, "export", root, tmp_path / "out").err
    assert "__0_0.distcp" in told
    assert "bias" in told or "weight" in told
    (root / "step-0000000002" / "__0_0.distcp").unlink()
    assert main(["export", str(root), str(tmp_path / "out")]) == 4
    assert not list(tmp_path.glob("out*"))


def lie(folder, shape):
    """Let a description claim another shape of a tensor than there are bytes for."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    described = metadata.state_dict_metadata["w"]
    described.size = torch.Size(shape)
    described.chunks[0].sizes = torch.Size(shape)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("shape", [[2**30, 2**25], [2**50], [3, 4], [5, 1]])
def test_a_shape_that_no_bytes_are_behind_is_refused(shape, tmp_path):
    dcp.save({"w": torch.ones(4, 3)}, checkpoint_id=tmp_path / "step-1")
    lie(tmp_path / "step-1", shape)
    for format in ("safetensors", "torch", "dcp"):
        with pytest.raises(ckptman.CorruptError, match="w"):
            ckptman.export(tmp_path / "step-1", tmp_path / "out", format)
    with pytest.raises(ckptman.CorruptError, match="w"):
        adopt(tmp_path / "step-1")
    assert sorted(each.name for each in (tmp_path / "step-1").iterdir()) == [".metadata", "__0_0.distcp"]
    assert not list(tmp_path.glob("out*"))


@pytest.mark.slow
def test_what_only_torch_can_read_is_exported_and_adopted(tmp_path):
    """A transposed tensor: the container of plain DCP holds its numbers in another order."""
    saved = {"w": torch.arange(6000.0).reshape(30, 200).t(), "part": torch.arange(100.0)[5:7]}
    dcp.save(saved, checkpoint_id=tmp_path / "step-1")
    ckptman.export(tmp_path / "step-1", tmp_path / "before")
    path = adopt(tmp_path / "step-1").path
    ckptman.export(path, tmp_path / "after")
    for out in ("before", "after"):
        found = load_file(tmp_path / out / "model.safetensors")
        assert all(torch.equal(found[name], each) for name, each in saved.items())
    assert main(["verify", str(path), "--world-size", "2"]) == 0


def test_while_it_is_read_no_prune_takes_it(root, tmp_path):
    seen = {}

    def begin(total_bytes):
        seen.update(look(root).names)

    ckptman.export(root / "step-0000000001", tmp_path / "out", begin=begin)
    assert list(seen) == ["step-0000000001"]
    assert "in use by export" in seen["step-0000000001"]
    assert look(root).names == {}


def test_two_adopt_the_same_folder_and_one_is_told_so(tmp_path):
    dcp.save({"w": torch.ones(4, 3)}, checkpoint_id=tmp_path / "step-1")
    told = []

    def other(count):
        try:
            adopt(tmp_path / "step-1")
        except ckptman.ExistsError as error:
            told.append(str(error))

    assert adopt(tmp_path / "step-1", done=other).step == 1
    assert told
    assert all("being adopted by another process" in each for each in told)

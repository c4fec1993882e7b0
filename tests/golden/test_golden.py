"""Checkpoints of format 1, as they were when it was frozen, are read bit for bit: by ckptman and by plain DCP."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptman
from ckptman.cli.app import main
from tests.golden.make import SHARDED, App, digest, tensors, text, values
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings(
    "ignore:B?Complex(Half|32) support is experimental", "ignore:torch.distributed is disabled"
)


@pytest.fixture(scope="module")
def expected(golden):
    return json.loads((golden / "expected.json").read_text())


def by_plain_dcp(folder, names):
    """Digests of the tensors of these names, loaded by torch alone."""
    described = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    flat = {
        name: torch.empty(described[name].size, dtype=described[name].properties.dtype)
        for name in names
        if isinstance(described.get(name), dcp.metadata.TensorStorageMetadata)
    }
    dcp.load(flat, checkpoint_id=folder, no_dist=True)
    return {name: digest(each) for name, each in flat.items()}


def test_every_dtype_and_layout(golden, expected):
    folder = golden / "one-rank" / "step-0000000001"
    fresh = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in tensors().items()}
    fresh["values"] = {**values(), "step": -1, "tensor": torch.zeros(2, 3, dtype=torch.int16)}
    ckptman.load(fresh, folder)
    found = fresh.pop("values")
    assert {name: digest(each) for name, each in fresh.items()} == expected["one-rank"]
    assert text(found) == text(values())
    assert by_plain_dcp(folder, expected["one-rank"]) == expected["one-rank"]


def restored(root, mesh, step=None):
    """On each rank: the step that is restored, and the digests of all that came back."""
    app = App(mesh)
    app.blank()
    with ckptman.Checkpointer(root, app.state, save_policy=ckptman.OnStop(), deadline=None) as run:
        return run.restore(step), app.digests()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", SHARDED)
def test_shards_on_any_number_of_ranks(name, world_size, golden, expected):
    root = str(golden / name)
    if world_size == 1:
        assert restored(root, None) == (2, expected[name])
    else:
        mesh = SHARDED[name] if world_size == 4 else (world_size,)
        assert run_ranks(world_size, restored, root, mesh) == [(2, expected[name])] * world_size
    tensors_of_model = {key: each for key, each in expected[name].items() if key.startswith("model.")}
    assert by_plain_dcp(Path(root, "step-0000000002"), tensors_of_model) == tensors_of_model


def test_what_the_dcp_writer_wrote(golden, expected):
    folder = golden / "dcp-4" / "step-0000000001"
    assert by_plain_dcp(folder, expected["dcp-4"]) == expected["dcp-4"]
    described = ckptman.StorageReader(folder).read_metadata().state_dict_metadata
    flat = {
        name: torch.empty(described[name].size, dtype=described[name].properties.dtype) for name in expected["dcp-4"]
    }
    flat["plain"] = {"n": 0}
    dcp.load(flat, storage_reader=ckptman.StorageReader(folder), no_dist=True)
    assert flat.pop("plain") == {"n": 3}
    assert {name: digest(each) for name, each in flat.items()} == expected["dcp-4"]


def test_every_byte_is_proved(golden, capsys):
    for root in ("one-rank", "dcp-4", *SHARDED, "run", "tier"):
        assert main(["verify", str(golden / root), "--all"]) == 0, capsys.readouterr()


def test_a_root_with_rollbacks_pins_proofs_rules_and_tiers(golden, expected, capsys):
    root = str(golden / "run")
    assert main(["list", root, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [each["step"] for each in listed] == [1, 2, 3, 4]
    assert [bool(each["abandoned"]) for each in listed] == [False, False, True, True]
    assert [each["pinned"] for each in listed] == ["for the paper", None, None, None]
    assert main(["prune", root, "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [each["keep"] for each in planned] == [True, True, False, False]
    assert restored(root, None) == (2, expected["run"]["2"])
    assert restored(root, None, 4) == (4, expected["run"]["4"])


def test_what_a_root_has_lost_comes_from_its_tier(golden, tmp_path, expected):
    root, tier = shutil.copytree(golden / "run", tmp_path / "run"), shutil.copytree(golden / "tier", tmp_path / "tier")
    shutil.rmtree(root / "step-0000000002")
    app = App()
    app.blank()
    with ckptman.Checkpointer(
        root, app.state, tiers=[ckptman.Tier(tier, every=2)], save_policy=ckptman.OnStop(), deadline=None
    ) as run:
        assert run.restore() == 2
    assert app.digests() == expected["run"]["2"]

"""`ckptman export`: what other programs load is what was saved, bit for bit, and OUT is whole or not there."""

import errno
import json

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckptman
from ckptman.storage.format.safetensors import DTYPES
from ckptman.tools.exporting import formats as export_formats
from ckptman.tools.exporting import write as export_write
from ckptman.tools.exporting.export import export
from tests.engine.dcp.test_values import WRITERS, blank, differing, noise
from tests.engine.dcp.test_values import save as save_as
from tests.helpers.faulty_disk import Death, FaultyDisk, faults, on_disk
from tests.helpers.ranks import run_ranks

pytestmark = [
    pytest.mark.usefixtures("forked"),
    pytest.mark.filterwarnings("ignore:.*in a single process", "ignore:B?Complex(Half|32) support is experimental"),
]


def tensors():
    """Every dtype that safetensors has, in odd shapes, without dimensions and without elements."""
    found = {f"of.{name}": noise(getattr(torch, name), 7, 5, 3) for name in DTYPES}
    return found | {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "large": noise(torch.float32, 700, 301)}


def state():
    optimizer = {"state": {"w": {"exp_avg": noise(torch.float32, 9)}}, "lr": 0.1, "seen": [torch.ones(2), {"a": 1}]}
    return {"model": tensors(), "optimizer": optimizer, "epoch": 3, "name": "é", "shape": (1, 2)}


@pytest.fixture(scope="module", params=WRITERS)
def folder(request, tmp_path_factory):
    """The same state, saved by each of those who can."""
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    save_as(state(), path, request.param)
    return path


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """So that a tensor of a few hundred KB is cut as one of many GB is."""
    monkeypatch.setattr(export_write, "PIECE_BYTES", 64 * 1024)
    monkeypatch.setattr(export_formats, "CHUNK_BYTES", 200 * 1024)


def names_in(folder):
    return sorted(each.name for each in folder.iterdir())


def test_safetensors_loads_the_model_bit_for_bit(folder, tmp_path):
    told = []
    done = export(folder, tmp_path / "out", begin=lambda total: told.append(-total) or told.append)
    assert done.files == {"model.safetensors": (tmp_path / "out" / "model.safetensors").stat().st_size}
    assert sum(told) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == tensors().keys()
    assert differing(found, tensors()) == []
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "ckptman": "export"}


def test_many_files_have_an_index_and_no_more_than_they_may(folder, tmp_path):
    done = export(folder, tmp_path / "out", max_shard_bytes=2000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    assert sorted(done.files) == names_in(tmp_path / "out") == [*files, "model.safetensors.index.json"]
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in tensors().values())
    found = {}
    for file in files:
        here = load_file(tmp_path / "out" / file)
        assert sum(each.nbytes for each in here.values()) <= 2000 or len(here) == 1
        assert {name for name, where in index["weight_map"].items() if where == file} == here.keys()
        found |= here
    assert differing(found, tensors()) == []


def test_torch_loads_the_model_and_the_whole_state(folder, tmp_path):
    export(folder, tmp_path / "model.pt", "torch")
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert list(found) == list(tensors())
    assert differing(found, tensors()) == []

    export(folder, tmp_path / "all.pt", "torch", everything=True)
    found, saved = torch.load(tmp_path / "all.pt", weights_only=True), state()
    assert differing(found["model"], tensors()) == []
    assert torch.equal(found["optimizer"]["state"]["w"]["exp_avg"], saved["optimizer"]["state"]["w"]["exp_avg"])
    assert torch.equal(found["optimizer"]["seen"][0], torch.ones(2))
    assert (found["optimizer"]["seen"][1], found["optimizer"]["lr"]) == ({"a": 1}, 0.1)
    assert (found["epoch"], found["name"], found["shape"]) == (3, "é", (1, 2))
    assert names_in(tmp_path) == ["all.pt", "model.pt"]


def test_plain_dcp_loads_it_under_the_names_it_had(folder, tmp_path):
    export(folder, tmp_path / "model", "dcp")
    assert names_in(tmp_path / "model") == [".metadata", "__0_0.distcp"]
    fresh = {"model": {name: blank(each) for name, each in tensors().items()}}
    dcp.load(fresh, checkpoint_id=tmp_path / "model")
    assert differing(fresh["model"], tensors()) == []

    export(folder, tmp_path / "all", "dcp", everything=True)
    fresh = state()
    for each in (*fresh["model"].values(), fresh["optimizer"]["seen"][0]):
        each.copy_(blank(each))
    fresh |= {"epoch": 0, "name": "", "shape": ()}
    dcp.load(fresh, checkpoint_id=tmp_path / "all")
    assert differing(fresh["model"], tensors()) == []
    assert (fresh["epoch"], fresh["name"], fresh["shape"]) == (3, "é", (1, 2))
    # Without a state to fill, DCP builds one from the paths.
    dcp_to_torch_save(tmp_path / "all", tmp_path / "all.pt")
    assert torch.load(tmp_path / "all.pt", weights_only=True)["optimizer"]["seen"][1] == {"a": 1}


@pytest.mark.slow
def test_what_was_exported_can_be_exported_again_and_verified(folder, tmp_path):
    from ckptman.cli.app import main

    export(folder, tmp_path / "once", "dcp", everything=True)
    assert main(["verify", str(tmp_path / "once")]) == 0
    export(tmp_path / "once", tmp_path / "twice", "torch")
    assert differing(torch.load(tmp_path / "twice", weights_only=True), tensors()) == []


def _save_sharded(path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    whole = {"uneven": torch.randn(7, 5), "other": torch.randn(3, 301), "few": torch.randn(1, 4)}
    layouts = {"uneven": Shard(0), "other": Shard(1), "few": Shard(0)}
    model = {
        name: distribute_tensor(each, mesh, [Replicate(), layouts[name]], src_data_rank=None)
        for name, each in whole.items()
    }
    ckptman.save({"model": model}, path)
    if dist.get_rank() == 0:
        for format in ("safetensors", "torch"):
            export(path, f"{path}.{format}", format)
        assert differing(load_file(f"{path}.safetensors/model.safetensors"), whole) == []
        assert differing(torch.load(f"{path}.torch", weights_only=True), whole) == []


@pytest.mark.slow
def test_shards_and_replicas_become_whole_tensors(tmp_path):
    run_ranks(4, _save_sharded, str(tmp_path / "checkpoint"))


def test_a_cast_is_torchs_own_and_leaves_what_is_no_float(tmp_path):
    path = tmp_path / "saved"
    saved = {
        "w": torch.randn(300, 301),
        "count": torch.tensor(7),
        "half": torch.randn(5).half(),
        "eight": noise(torch.float8_e4m3fn, 4),
        "inf": torch.tensor(torch.inf),
    }
    ckptman.save({"model": saved}, path)
    export(path, tmp_path / "out", dtype="bfloat16")
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = saved | {name: saved[name].to(torch.bfloat16) for name in ("w", "half", "inf")}
    assert differing(found, expected) == []
    for format in ("torch", "dcp"):
        export(path, tmp_path / format, format, dtype="float64")
    assert torch.load(tmp_path / "torch", weights_only=True)["w"].dtype == torch.float64
    fresh = {"model": {"w": torch.zeros(300, 301, dtype=torch.float64)}}
    dcp.load(fresh, checkpoint_id=tmp_path / "dcp")
    assert torch.equal(fresh["model"]["w"], saved["w"].double())


def test_the_default_device_of_a_script_does_not_matter(tmp_path):
    weight = torch.randn(30, 4)
    ckptman.save({"model": {"w": weight, "same": weight.clone()}}, tmp_path / "saved")
    with torch.device("meta"):
        export(tmp_path / "saved", tmp_path / "out", dtype="bfloat16", tied=[("same", "w")])
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], weight.bfloat16())


def test_another_entry_and_other_names(tmp_path):
    saved = {
        "app": {"ema": {"module.layers.0.w": torch.ones(2), "module.norm": torch.zeros(1)}},
        "model": {"x": torch.ones(1)},
    }
    ckptman.save(saved, tmp_path / "saved")
    rename = [(r"^layers\.", "model.layers."), ("norm", "final_norm")]
    for format in ("safetensors", "torch"):
        export(tmp_path / "saved", tmp_path / format, format, only="app.ema", strip="module.", rename=rename)
    expected = {"model.layers.0.w", "final_norm"}
    assert load_file(tmp_path / "safetensors" / "model.safetensors").keys() == expected
    assert torch.load(tmp_path / "torch", weights_only=True).keys() == expected
    export(tmp_path / "saved", tmp_path / "dcp", "dcp", only="app.ema", strip="app.ema.")
    fresh = {"module.norm": torch.ones(1)}
    dcp.load(fresh, checkpoint_id=tmp_path / "dcp")
    assert fresh["module.norm"].item() == 0
    export(tmp_path / "saved", tmp_path / "all", everything=True)
    assert load_file(tmp_path / "all" / "model.safetensors").keys() == {
        *("app.ema.module.layers.0.w", "app.ema.module.norm", "model.x")
    }


def test_a_model_whose_names_begin_at_the_top_is_found(tmp_path):
    """As torchtitan saves it: the model is spread over the state, everything else has an entry."""
    saved = {"layers.0.w": torch.ones(2), "norm": torch.zeros(1), "optimizer": {"state.norm": torch.ones(1)}, "step": 3}
    dcp.save(saved, checkpoint_id=tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"layers.0.w", "norm"}


def test_what_has_no_form_in_json_is_exported_all_the_same(tmp_path):
    saved = {"model": {"w": torch.ones(2), "extra": slice(1)}, "x": {"a": torch.zeros(1), "b": slice(1)}}
    save_as(saved, tmp_path / "saved", "StorageWriter")
    with pytest.raises(ckptman.CorruptError, match="slice"):
        export(tmp_path / "saved", tmp_path / "out", "dcp", everything=True)
    told = export(tmp_path / "saved", tmp_path / "out").remarks
    assert told == ["safetensors holds tensors alone: 1 plain values were left out"]
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"w"}


def test_tied_weights_are_saved_once_and_only_if_they_are_the_same(tmp_path):
    weight = torch.randn(300, 301)
    saved = {"embed_tokens.weight": weight, "lm_head.weight": weight.clone(), "norm": torch.ones(2)}
    ckptman.save({"model": saved}, tmp_path / "saved")
    pair = ("lm_head.weight", "embed_tokens.weight")
    done = export(tmp_path / "saved", tmp_path / "out", tied=[pair])
    assert done.remarks == ["lm_head.weight was left out: it is tied to embed_tokens.weight"]
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"embed_tokens.weight", "norm"}
    config = tmp_path / "config.json"
    config.write_text('{"tie_word_embeddings": true}')
    assert export(tmp_path / "saved", tmp_path / "said twice", tied=[pair], config=config).remarks == done.remarks
    saved["lm_head.weight"][299, 300] += 1
    ckptman.save({"model": saved}, tmp_path / "saved", overwrite=True)
    with pytest.raises(ckptman.ConfigError, match=r"lm_head.weight and embed_tokens.weight are not the same"):
        export(tmp_path / "saved", tmp_path / "other", tied=[pair])
    with pytest.raises(ckptman.ConfigError, match="there is no other tensor head"):
        export(tmp_path / "saved", tmp_path / "other", tied=[("head", "norm")])


ONE = {"a": torch.ones(1)}


@pytest.mark.parametrize(
    ("model", "wishes", "match"),
    [
        (
            {"c": torch.ones(2, dtype=torch.complex128)},
            {},
            r"c has the dtype complex128, .* no form for.*\(--exclude\)",
        ),
        ({"__metadata__": torch.ones(2)}, {}, "no tensor of the name '__metadata__'"),
        ({**ONE, "b": torch.ones(1)}, {"rename": [("a|b", "c")]}, "model.a and model.b would both be c"),
        (ONE, {"rename": [("a", "")]}, "model.a would have no name"),
        (ONE, {"rename": [("(", "")]}, "--rename"),
        (ONE, {"rename": [("a", r"\3")]}, "--rename"),
        (ONE, {"only": "ema"}, "no entry 'ema': --only takes epoch, model, other"),
        (ONE, {"only": "epoch"}, "there is no tensor"),
        ({"a": 1}, {}, "no tensor to export in model: "),
        (ONE, {"exclude": ["."]}, "no tensor to export in model: "),
        (ONE, {"exclude": ["("]}, r"--exclude \("),
        (ONE, {"only": "model", "everything": True}, "exclude each other"),
        (ONE, {"everything": True, "dtype": "bfloat16"}, "--dtype is for weights"),
        (ONE, {"dtype": "int8"}, "cast to one of float64"),
        ({"w": torch.tensor([1, 7e4])}, {"dtype": "float16"}, "model.w holds .* as bfloat16 or float32 or float64$"),
        ({"w": torch.tensor([3.4e38])}, {"dtype": "bfloat16"}, "as float32 or float64$"),
        ({"w": torch.tensor([1e39], dtype=torch.float64)}, {"dtype": "float32"}, "as float64$"),
        (ONE, {"format": "gguf"}, "one of safetensors, torch, dcp"),
        (ONE, {"format": "torch", "config": "x"}, "are for what Hugging Face loads"),
        (ONE, {"format": "dcp", "tied": [("a", "b")]}, "are for what Hugging Face loads"),
        ({**ONE, "n": np.ones(2)}, {"format": "torch"}, "value n is a numpy.ndarray, which torch.load"),
        (ONE, {"out": "out.pt"}, "say --format torch, or name a folder"),
        (ONE, {"out": "out.pt", "format": "dcp"}, "say --format torch, or name a folder"),
        (ONE, {"out": "saved/out"}, "within the checkpoint"),
        (ONE, {"out": "step-0000000001", "format": "dcp"}, "name of a checkpoint"),
    ],
)
def test_what_cannot_be_is_refused_by_name(model, wishes, match, tmp_path):
    ckptman.save({"model": model, "epoch": 1, "other": torch.ones(1)}, tmp_path / "saved")
    wishes = {"out": "out", **wishes}
    with pytest.raises(ckptman.ConfigError, match=match):
        export(tmp_path / "saved", tmp_path / wishes.pop("out"), **wishes)
    assert names_in(tmp_path) == ["saved"]
    assert "out" not in names_in(tmp_path / "saved")


def test_nothing_is_replaced_that_is_not_asked_for(folder, tmp_path):
    export(folder, tmp_path / "out")
    with pytest.raises(ckptman.ExistsError, match="overwrite"):
        export(folder, tmp_path / "out")
    export(folder, tmp_path / "out", max_shard_bytes=2000, overwrite=True)
    assert "model.safetensors" not in names_in(tmp_path / "out")
    (tmp_path / "link").symlink_to(tmp_path / "out")
    with pytest.raises(ckptman.ExistsError, match="is not a folder"):
        export(folder, tmp_path / "link", overwrite=True)
    ckptman.save({"w": torch.ones(1)}, tmp_path / "mine")
    with pytest.raises(ckptman.ExistsError, match="is a checkpoint"):
        export(folder, tmp_path / "mine", "dcp", overwrite=True)
    with pytest.raises(ckptman.NotFoundError):
        export(tmp_path / "nowhere", tmp_path / "new")


def test_a_changed_byte_is_found_and_nothing_is_left(tmp_path):
    ckptman.save({"model": tensors()}, tmp_path / "saved")
    data = bytearray((tmp_path / "saved" / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "saved" / "__0_0.distcp").write_bytes(data)
    for format in ("safetensors", "torch", "dcp"):
        with pytest.raises(ckptman.CorruptError, match=r"__0_0.distcp.*large|large.*__0_0.distcp"):
            export(tmp_path / "saved", tmp_path / "out", format)
    assert names_in(tmp_path) == ["saved"]


def _first(out):
    return lambda: export(out.parent / "saved", out)


def _replacing(out):
    export(out.parent / "saved", out, dtype="bfloat16")
    return lambda: export(out.parent / "saved", out, overwrite=True)


def _file(out):
    return lambda: export(out.parent / "saved", out, "torch")


@pytest.mark.parametrize("error", [None, errno.ENOSPC])
@pytest.mark.parametrize("begin", [_first, _replacing, _file])
def test_out_is_whole_or_not_there_wherever_it_ends(begin, error, tmp_path):
    model = {"w": torch.randn(100, 301), "b": torch.ones(3)}
    reached = 0
    for number, fault in enumerate(faults(error)):
        root = tmp_path / str(number)
        ckptman.save({"model": model}, root / "saved")
        run, out = begin(root / "out"), root / "out"
        before = names_in(root)
        disk = FaultyDisk(fault)
        try:
            with on_disk(disk):
                run()
        except (Death, OSError) as ending:
            assert error is None or isinstance(ending, OSError)
            done = ("sync_folder", "rename") if fault.when == "after" else ("sync_folder",)
            if error is not None and disk.log[fault.at] not in done:
                assert names_in(root) == before
        reached += disk.struck
        if out.exists():
            found = torch.load(out) if out.is_file() else load_file(out / "model.safetensors")
            old = {name: each.to(torch.bfloat16) for name, each in model.items()}
            assert differing(found, model) == [] or (begin is _replacing and differing(found, old) == [])
        elif begin is _replacing:
            # Dead between two renames: the old one is beside it.
            (aside,) = (each for each in root.iterdir() if each.name.endswith(".old"))
            assert (aside / "model.safetensors").exists()
        # And it can be done again.
        export(root / "saved", out, "torch" if begin is _file else "safetensors", overwrite=True)
        if not disk.struck:
            break
    assert reached > 10

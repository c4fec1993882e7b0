"""`ckptman export`: checkpoints that change while they are read, and what is in the place of OUT."""

import json
import os
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

import ckptman
from ckptman.cli.app import main
from ckptman.storage.format.paths import MANIFEST
from ckptman.storage.io.durable_files import Disk
from ckptman.tools.exporting import target as export_target
from ckptman.tools.exporting import write as export_write
from ckptman.tools.exporting.export import export
from tests.helpers.faulty_disk import on_disk

pytestmark = pytest.mark.filterwarnings("ignore:.*in a single process", "ignore:Detected an existing checkpoint")
FORMATS = ["safetensors", "torch", "dcp"]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """So that some of a checkpoint is read before something happens, and some behind it."""
    monkeypatch.setattr(export_write, "PIECE_BYTES", 16 * 1024)


def state(value):
    return {"model": {f"w{number}": torch.full((64, 100), float(value)) for number in range(8)}, "step": int(value)}


def halfway(act):
    """What `begin` is to be, so that something happens once when half of the bytes were written."""

    def begin(total_bytes):
        left = total_bytes / 2

        def done(written):
            nonlocal left
            left, was_above = left - written, left > 0
            if was_above and left <= 0:
                act()

        return done

    return begin


def names_in(folder):
    return sorted(each.name for each in folder.iterdir())


def save_plain(value, path):
    dcp.save(state(value), checkpoint_id=path)


@pytest.mark.parametrize("format", FORMATS)
def test_plain_dcp_that_is_saved_over_is_no_mixture(format, tmp_path):
    save_plain(1, tmp_path / "saved")
    with pytest.raises(ckptman.NotFoundError, match=r"saved again, while it was exported \(.metadata was written to\)"):
        export(tmp_path / "saved", tmp_path / "out", format, begin=halfway(lambda: save_plain(2, tmp_path / "saved")))
    assert names_in(tmp_path) == ["saved"]
    export(tmp_path / "saved", tmp_path / "out", format)


def test_one_data_file_that_changes_is_enough_and_what_lies_beside_is_not(tmp_path):
    save_plain(1, tmp_path / "saved")
    data = tmp_path / "saved" / "__0_0.distcp"

    def touch():
        os.utime(data, ns=(0, 0))

    with pytest.raises(ckptman.NotFoundError, match=r"__0_0.distcp was written to"):
        export(tmp_path / "saved", tmp_path / "out", begin=halfway(touch))

    def replace():
        shutil.copy2(data, tmp_path / "copy")
        (tmp_path / "copy").rename(data)

    with pytest.raises(ckptman.NotFoundError, match=r"__0_0.distcp was written to"):
        export(tmp_path / "saved", tmp_path / "out", begin=halfway(replace))
    export(tmp_path / "saved", tmp_path / "out", begin=halfway((tmp_path / "saved" / "log.txt").touch))
    assert names_in(tmp_path) == ["out", "saved"]


def test_a_data_file_that_could_not_be_listed_did_not_change_for_that(tmp_path):
    data = tmp_path / "saved" / "data" / "__0_0.distcp"
    save_plain(1, tmp_path / "saved")
    metadata = pickle.loads((tmp_path / "saved" / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "data/__0_0.distcp"
    (tmp_path / "saved" / ".metadata").write_bytes(pickle.dumps(metadata))
    data.parent.mkdir()
    (tmp_path / "saved" / "__0_0.distcp").rename(data)
    export(tmp_path / "saved", tmp_path / "out")
    with pytest.raises(ckptman.NotFoundError, match=r"data/__0_0.distcp was written to"):
        export(tmp_path / "saved", tmp_path / "other", begin=halfway(lambda: os.utime(data, ns=(0, 0))))


def test_one_that_is_adopted_meanwhile_is_the_same(tmp_path):
    save_plain(1, tmp_path / "saved")
    adopt = halfway(lambda: ckptman.adopt(tmp_path / "saved", 1, keep_name=True))
    export(tmp_path / "saved", tmp_path / "out", begin=adopt)
    assert names_in(tmp_path) == ["out", "saved"]
    assert (tmp_path / "saved" / MANIFEST).exists()


@pytest.mark.parametrize(
    "save", [lambda value, path: ckptman.save(state(value), path), save_plain], ids=["ckptman", "dcp"]
)
@pytest.mark.parametrize("again", [False, True], ids=["deleted", "saved again"])
def test_what_is_gone_is_not_damaged(save, again, tmp_path):
    saved = tmp_path / "saved"
    save(1, saved)

    def act():
        shutil.rmtree(saved)
        if again:
            save(2, saved)  # the same bytes would be the same checkpoint

    told = r"was deleted, or saved again, while it was exported .*: nothing was made of it"
    with pytest.raises(ckptman.NotFoundError, match=told):
        export(saved, tmp_path / "out", begin=halfway(act))
    assert names_in(tmp_path) == (["saved"] if again else [])


def test_what_is_damaged_is_not_gone(tmp_path):
    """Though its data file was written to: that is what damage is."""
    ckptman.save(state(1), tmp_path / "saved")
    data = tmp_path / "saved" / "__0_0.distcp"

    def damage():
        with data.open("r+b") as file:
            file.seek(-10_000, os.SEEK_END)
            file.write(b"\xff")

    with pytest.raises(ckptman.CorruptError, match=r"__0_0.distcp"):
        export(tmp_path / "saved", tmp_path / "out", begin=halfway(damage))
    save_plain(1, tmp_path / "plain")
    (tmp_path / "plain" / "__0_0.distcp").unlink()
    with pytest.raises(ckptman.CorruptError, match=r"__0_0.distcp"):
        export(tmp_path / "plain", tmp_path / "out")
    assert names_in(tmp_path) == ["plain", "saved"]


@pytest.fixture
def saved(tmp_path):
    ckptman.save(state(1), tmp_path / "saved")
    return tmp_path / "saved"


def refused(saved, out, format, match, **wishes):
    """Nothing that is there changes."""

    def contents():
        return {each: each.read_bytes() for each in (out, *out.rglob("*")) if each.is_file()}

    before = contents()
    with pytest.raises(ckptman.ExistsError, match=match):
        export(saved, out, format, overwrite=True, **wishes)
    assert contents() == before


def test_no_file_of_others_becomes_a_zip(saved, tmp_path):
    (tmp_path / "train.py").write_text("print('my script')\n")
    (tmp_path / "empty").touch()
    torch.save({"w": torch.ones(3)}, tmp_path / "theirs.pt")
    for name in ("train.py", "empty", "theirs.pt"):
        refused(saved, tmp_path / name, "torch", "is a file that no export wrote, so it is not replaced: name another")


def test_no_checkpoint_of_plain_dcp_is_replaced(saved, tmp_path):
    save_plain(2, tmp_path / "one")
    save_plain(2, tmp_path / "two")
    shutil.copy(tmp_path / "two" / "__0_0.distcp", tmp_path / "two" / "__1_0.distcp")
    export(saved, tmp_path / "ckptman-export-3", "dcp")
    save_plain(2, tmp_path / "ckptman-export-3")  # into what was an export
    for name in ("one", "two", "ckptman-export-3"):
        refused(saved, tmp_path / name, "dcp", r"holds .metadata, which no export wrote")
    (tmp_path / "one" / ".metadata").unlink()
    refused(saved, tmp_path / "one", "dcp", r"holds __0_0.distcp, which no export wrote")
    export(saved, tmp_path / "ours", "dcp")
    shutil.copy(tmp_path / "two" / "__0_0.distcp", tmp_path / "ours" / "__1_0.distcp")
    refused(saved, tmp_path / "ours", "dcp", r"holds __1_0.distcp, which no export wrote")


def test_no_model_that_was_downloaded_is_replaced(saved, tmp_path):
    for name in ("config alone", "model", "shards"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    save_file(state(2)["model"], tmp_path / "model" / "model.safetensors", {"format": "pt"})
    for number in (1, 2):
        save_file({"w": torch.ones(2)}, tmp_path / "shards" / f"model-0000{number}-of-00002.safetensors")
    (tmp_path / "shards" / "model.safetensors.index.json").write_text("{}")
    config = tmp_path / "given.json"
    config.write_text("{}")
    for name in ("config alone", "model", "shards"):
        refused(saved, tmp_path / name, "safetensors", r"holds config.json, which no export wrote", config=config)
    export(saved, tmp_path / "ours")
    shutil.copy(tmp_path / "shards" / "model-00001-of-00002.safetensors", tmp_path / "ours")
    refused(saved, tmp_path / "ours", "safetensors", r"holds model-00001-of-00002.safetensors, which no export wrote")


def test_a_config_is_replaced_by_another_and_never_lost(saved, tmp_path):
    out, config = tmp_path / "out", tmp_path / "config.json"
    config.write_text('{"a": 1}')
    export(saved, out, config=config)
    refused(saved, out, "safetensors", r"config.json would be lost: keep it by --config")
    export(saved, out, config=out / "config.json", dtype="bfloat16", overwrite=True)
    assert json.loads((out / "config.json").read_text()) == {"a": 1}
    assert load_file(out / "model.safetensors")["w0"].dtype == torch.bfloat16


@pytest.mark.parametrize("format", FORMATS)
def test_an_export_is_replaced_by_one_of_its_own_format(format, saved, tmp_path):
    out = tmp_path / "out"
    export(saved, out, format, max_shard_bytes=60_000)
    export(saved, out, format, dtype="float64", overwrite=True)
    for other in {*FORMATS} - {format}:
        refused(saved, out, other, "which no export wrote|is not a file|is not a folder")
    if format == "dcp":
        found = {"model": {name: torch.zeros_like(each).double() for name, each in state(1)["model"].items()}}
        dcp.load(found, checkpoint_id=out)
        assert found["model"]["w7"].unique().tolist() == [1.0]
    elif format == "torch":
        for is_mapped in (False, True):
            assert torch.load(out, weights_only=True, mmap=is_mapped)["w7"].unique().tolist() == [1.0]
    else:
        assert load_file(out / "model.safetensors")["w7"].unique().tolist() == [1.0]
    assert names_in(tmp_path) == ["out", "saved"]


class Interrupted(Disk):
    """An export that is interrupted (Ctrl-C) between its two renames."""

    def rename(self, source, target):
        super().rename(source, target)
        if target.name.endswith(".old"):
            raise KeyboardInterrupt


def test_interrupted_between_its_renames_it_puts_the_old_one_back(saved, tmp_path):
    export(saved, tmp_path / "out", dtype="bfloat16")
    with on_disk(Interrupted()), pytest.raises(KeyboardInterrupt):
        export(saved, tmp_path / "out", overwrite=True)
    assert names_in(tmp_path) == ["out", "saved"]
    assert load_file(tmp_path / "out" / "model.safetensors")["w0"].dtype == torch.bfloat16


class Late(Disk):
    """Somebody makes a folder of that name right before it is given."""

    def rename(self, source, target):
        target.mkdir()
        (target / "mine").touch()
        super().rename(source, target)


def test_a_folder_that_is_made_at_the_last_moment_is_not_replaced(saved, tmp_path):
    with on_disk(Late()), pytest.raises(OSError, match="not empty"):
        export(saved, tmp_path / "out")
    assert (names_in(tmp_path), names_in(tmp_path / "out")) == (["out", "saved"], ["mine"])


def left_by(pid, ticks, target, old=False):
    """A folder as an export of another process of this host has it."""
    me = export_target.this_process("", None)
    path = target.with_name(f"{target.name}.tmp-{pid}-{export_target._host(me)}-{ticks}-0a1b2c3d{'.old' * old}")
    path.mkdir()
    (path / "model.safetensors").write_text("half")
    return path


def test_only_what_is_of_the_dead_is_cleared(saved, tmp_path):
    out, me = tmp_path / "out", export_target.this_process("", None)
    dead = left_by(me.pid, me.start_ticks + 1, out)  # the pid was given to another process since
    kept = [
        *(left_by(me.pid, me.start_ticks, out), left_by(0, 0, out)),
        left_by(me.pid, me.start_ticks + 2, out, old=True),
    ]
    out.mkdir()  # as scripts do first: nothing is in it that could replace the old one
    told = export(saved, out, overwrite=True).remarks
    assert not dead.exists()
    assert all((each / "model.safetensors").exists() for each in kept)
    assert f"{dead.name}, which an export left that was killed, was removed" in told
    assert f"{kept[2]} is what out was before an export that was killed: remove it" in told
    assert len(told) == 4
    assert len(export(saved, out, overwrite=True).remarks) == 3
    assert names_in(tmp_path) == sorted(["out", "saved", *(each.name for each in kept[:2])])


def test_what_cannot_be_cleared_is_named(saved, tmp_path):
    class Stubborn(Disk):
        def remove_tree(self, path):
            raise PermissionError(13, "Permission denied")

    me = export_target.this_process("", None)
    left = left_by(me.pid, me.start_ticks + 1, tmp_path / "out")
    with on_disk(Stubborn()):
        (told,) = export(saved, tmp_path / "out").remarks
    assert told.startswith(f"{left}, which an export left that was killed, could not be removed")


def test_what_has_no_form_is_left_out_by_its_name(tmp_path):
    model = {
        "w": torch.ones(2),
        "table": torch.ones(2, dtype=torch.complex128),
        "layers": {"0": {"table": torch.ones(1)}},
    }
    whole = {"model": model, "seen": [torch.ones(3), {"a": 1}], "optimizer": {"lr": 1.0}}
    ckptman.save(whole, tmp_path / "saved")
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out"), "--exclude", "^table$"]) == 0
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"w", "layers.0.table"}
    for format in ("torch", "dcp"):
        wishes = {"everything": True, "exclude": ["table$", "^optimizer", r"^seen\.0"]}
        export(tmp_path / "saved", tmp_path / format, format, **wishes)
    found = torch.load(tmp_path / "torch", weights_only=True)
    assert (found.keys(), found["model"].keys(), found["seen"]) == ({"model", "seen"}, {"w"}, [None, {"a": 1}])
    read = dcp.FileSystemReader(tmp_path / "dcp").read_metadata()
    assert read.state_dict_metadata.keys() == {"model.w", "seen.0", "seen.1.a"}
    export(tmp_path / "saved", tmp_path / "without", "torch", everything=True, exclude=["^seen", "^model.table"])
    assert torch.load(tmp_path / "without", weights_only=True).keys() == {"model", "optimizer"}


def test_tensors_in_a_tuple_go_to_dcp_alone(tmp_path):
    dcp.save({"model": {"w": torch.ones(3)}, "pair": (torch.zeros(2), 1)}, checkpoint_id=tmp_path / "saved")
    with pytest.raises(ckptman.ConfigError, match=r"pair has tensors within a tuple.*\(--exclude\)"):
        export(tmp_path / "saved", tmp_path / "out", "torch", everything=True)
    export(tmp_path / "saved", tmp_path / "dcp", "dcp", everything=True)
    fresh = {"model": {"w": torch.zeros(3)}, "pair": ()}
    dcp.load(fresh, checkpoint_id=tmp_path / "dcp")
    assert torch.equal(fresh["pair"][0], torch.zeros(2))


def test_a_model_in_parts_is_the_model(tmp_path):
    ckptman.save({"model": [{"w": torch.ones(2)}, {"w": torch.zeros(2)}]}, tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"0.w", "1.w"}


def test_the_optimizer_of_the_whole_state_is_loaded_by_torch(tmp_path):
    def fresh(rate):
        model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.LayerNorm(5))
        groups = [{"params": model[0].parameters(), "lr": rate}, {"params": model[1].parameters()}]
        return model, torch.optim.AdamW(groups)

    model, optimizer = fresh(0.25)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    ckptman.save({"model": model, "optimizer": optimizer, "epoch": 1}, tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "all.pt", "torch", everything=True)
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    other_model, other = fresh(1.0)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    set_optimizer_state_dict(other_model, other, found["optimizer"], options=options)
    one, two = optimizer.state_dict(), other.state_dict()
    assert one["param_groups"] == two["param_groups"]
    assert one["state"].keys() == two["state"].keys()
    for number, entries in one["state"].items():
        assert all(torch.equal(each, two["state"][number][name]) for name, each in entries.items())

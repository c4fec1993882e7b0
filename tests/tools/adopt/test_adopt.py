"""`ckptman adopt`: what plain DCP wrote is ckptman's, its files as they were; or it is refused, and as it was."""

import errno
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckptman
from ckptman.cli.app import main
from ckptman.engine.loading.checkpoint_reader import SavedState
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.io.durable_files import Disk
from ckptman.tools.adopt.adopt import adopt, candidates
from tests.engine.dcp.test_values import differing, emptied, load
from tests.helpers import unprivileged
from tests.helpers.checkpoints import commit, flip_byte
from tests.helpers.faulty_disk import Death, Fault, FaultyDisk, faults, holds, on_disk
from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.usefixtures("forked"), pytest.mark.filterwarnings("ignore:.*in a single process")]


def state(shift=0.0):
    generator = torch.Generator().manual_seed(0)
    return {
        "model": {"w": torch.randn(300, 301, generator=generator) + shift, "b": torch.ones(5, dtype=torch.bfloat16)},
        "optimizer": {"state": {"w": torch.randn(5)}, "lr": 0.1, "seen": [torch.ones(2), {"a": 1}]},
        "epoch": 3,
        "shape": (1, 2),
    }


def save(path, files=3, shift=0.0):
    dcp.save(state(shift), storage_writer=dcp.FileSystemWriter(path, thread_count=files))
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return save(tmp_path_factory.mktemp("plain") / "step-1000")


@pytest.fixture
def folder(plain, tmp_path):
    return Path(shutil.copytree(plain, tmp_path / "root" / "step-1000"))


def files(folder):
    return {each.name: each.read_bytes() for each in folder.iterdir()}


def names_and_links(folder):
    """What is in a folder, a link by what it points to."""
    return {each.name: each.readlink() if each.is_symlink() else each.read_bytes() for each in folder.iterdir()}


def comes_back(path):
    """Whoever loads it has what was saved."""
    wanted = {name: state()[name] for name in ("model", "epoch", "shape")}
    for reader in ("ckptman.load", "dcp"):
        load(fresh := emptied(wanted), path, reader)
        assert differing(fresh, wanted) == []


@pytest.mark.slow
def test_it_is_a_checkpoint_then_and_its_files_are_what_they_were(folder, capsys):
    before = files(folder)
    assert {"__0_0.distcp", "__0_1.distcp", "__0_2.distcp"} < before.keys()
    done = adopt(folder)
    assert done.path == folder.with_name("step-0000001000")
    assert not folder.exists()
    after = files(done.path)
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() == {
        *("blocks-00000.bin", "blocks-00000-1.bin", "blocks-00000-2.bin", "chunks.bin", "index.json", "manifest.json")
    }
    comes_back(done.path)
    root = folder.parent
    assert holds(root).keys() == {1000}
    assert main(["verify", str(root), "--world-size", "2"]) == 0
    told = capsys.readouterr().out
    assert "on 2 processes: loads, bit for bit what was saved" in told
    assert "not in the manifest" not in told


@pytest.mark.slow
def test_a_file_that_nothing_is_in_belongs_to_it(tmp_path, capsys):
    dcp.save({"w": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(tmp_path / "root" / "step-1", thread_count=3))
    assert (tmp_path / "root" / "step-1" / "__0_2.distcp").stat().st_size == 0
    path = adopt(tmp_path / "root" / "step-1").path
    assert main(["verify", str(path), "--world-size", "1"]) == 0
    assert "not in the manifest" not in capsys.readouterr().out
    assert main(["copy", str(path), str(tmp_path / "copies")]) == 0
    assert holds(tmp_path / "copies").keys() == {1}


def test_what_an_earlier_save_left_does_not_belong_to_it(folder, capsys):
    """Saved again on fewer ranks, plain DCP leaves the files of the others."""
    shutil.copy(folder / "__0_1.distcp", folder / "__7_0.distcp")
    path = adopt(folder).path
    assert (path / "__7_0.distcp").exists()
    (entry,) = Catalog(path.parent).complete()
    manifest = entry.require_manifest()
    assert ("__7_0.distcp" in manifest.files, manifest.world_size) == (False, 1)
    assert main(["verify", str(path)]) == 0
    assert "__7_0.distcp" in capsys.readouterr().out


def test_a_run_goes_on_from_it(folder):
    def made():
        model = torch.nn.Linear(4, 3)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = made()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    saved, moments = get_state_dict(model, optimizer)
    root = folder.parent.with_name("run")
    dcp.save({"model": saved, "optimizer": moments, "epoch": 3}, checkpoint_id=root / "iter_0000007")
    adopt(root / "iter_0000007")
    fresh, other = made()
    values = {"model": fresh, "optimizer": other, "epoch": 0}
    with ckptman.Checkpointer(root, values, save_policy=ckptman.EverySteps(1)) as checkpointer:
        assert checkpointer.restore() == 7
        assert torch.equal(fresh.weight, model.weight)
        assert torch.equal(other.state[fresh.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
        assert values["epoch"] == 3
        checkpointer.step(8)
    assert [entry.step for entry in Catalog(root).complete()] == [7, 8]


def test_nothing_is_unpickled_and_a_changed_byte_is_found_from_then_on(folder, capsys):
    path = adopt(folder).path
    saved = SavedState.read(path)
    assert all(chunk.payload >= 0 for name in saved.index.tensors for chunk in saved.all_chunks(name))
    flip_byte(path / "__0_1.distcp")
    assert main(["verify", str(path)]) == 4
    assert "__0_1.distcp does not match its digest" in capsys.readouterr().out
    with pytest.raises(ckptman.CorruptError, match=r"__0_1.distcp"):
        ckptman.load(state(), path)


def whole():
    generator = torch.Generator().manual_seed(0)
    return {"uneven": torch.randn(7, 5, generator=generator), "other": torch.randn(3, 301, generator=generator)}


def _save_sharded(path):
    mesh = init_device_mesh("cpu", (4,))
    sharded = {name: distribute_tensor(each, mesh, [Shard(0)], src_data_rank=None) for name, each in whole().items()}
    dcp.save({"model": sharded}, storage_writer=dcp.FileSystemWriter(path, single_file_per_rank=False))


@pytest.mark.slow
def test_shards_of_many_ranks_in_many_files(tmp_path):
    run_ranks(4, _save_sharded, str(tmp_path / "global_step12"))
    done = adopt(tmp_path / "global_step12")
    ckptman.load(fresh := {"model": emptied(whole())}, done.path)
    assert differing(fresh["model"], whole()) == []
    (entry,) = Catalog(tmp_path).complete()
    assert (entry.step, entry.require_manifest().world_size) == (12, 4)


# ---- names, steps, order -----------------------------------------------------------------------------------------


def test_the_step_can_be_said_and_the_name_kept(folder, plain, tmp_path):
    final = Path(shutil.copytree(plain, tmp_path / "final"))
    with pytest.raises(ckptman.ConfigError, match="its name tells no step"):
        adopt(final)
    with pytest.raises(ckptman.ConfigError, match="a step is a number"):
        adopt(final, -1)
    assert adopt(final, 5, keep_name=True).path == final
    assert main(["verify", str(final)]) == 0
    comes_back(final)
    # Later the name is wanted after all: nothing is read again.
    with pytest.raises(ckptman.ExistsError, match="adopted as step 5: say --step 5"):
        adopt(final, 6)
    done = adopt(final, 5)
    assert (done.path.name, done.files) == ("step-0000000005", 0)
    with pytest.raises(ckptman.ExistsError, match="is a checkpoint of ckptman already"):
        adopt(done.path)
    with pytest.raises(ckptman.ConfigError, match="not that of step 6"):
        adopt(done.path, 6)
    assert adopt(folder, 5).path.parent == folder.parent  # another root has a step 5 of its own


def test_the_newest_is_that_of_the_highest_step_in_whatever_order(tmp_path):
    for step in (10, 2, 30, 1):
        save(tmp_path / f"step-{step}", files=1)
    os.utime(tmp_path / "step-1" / ".metadata")  # as copying does: the oldest has the latest date
    for step in (30, 1, 10, 2):
        adopt(tmp_path / f"step-{step}")
    assert [entry.step for entry in Catalog(tmp_path).complete()] == [1, 2, 10, 30]


class DiesBeforeItsName(Disk):
    def rename(self, source, target):
        if source.is_dir():
            raise Death
        super().rename(source, target)


def test_where_it_belongs_is_decided_when_it_gets_its_name(tmp_path):
    for step in (100, 200, 300):
        commit(tmp_path, step)
    adopt(save(tmp_path / "step-1000", files=1), keep_name=True)
    with on_disk(FaultyDisk(Fault(1))), pytest.raises(Death):
        adopt(tmp_path / "step-1000")  # the new manifest is written, and has no name yet
    done = adopt(tmp_path / "step-1000")
    assert not [name for name in files(done.path) if ".tmp-" in name]
    assert [entry.step for entry in Catalog(tmp_path).complete()] == [100, 200, 300, 1000]
    assert main(["prune", str(tmp_path), "--keep-last", "1"]) == 0
    assert holds(tmp_path).keys() == {1000}
    assert main(["verify", str(tmp_path)]) == 0


def test_one_whose_adoption_was_killed_belongs_where_its_step_is(tmp_path):
    for step in (500, 100):  # by their dates, as a copy may have left them, 100 is the later one
        save(tmp_path / f"step-{step}", files=1)
    with on_disk(DiesBeforeItsName()), pytest.raises(Death):
        adopt(tmp_path / "step-500")
    assert (tmp_path / "step-500" / "manifest.json").exists()
    for step in (100, 500):
        adopt(tmp_path / f"step-{step}")
    assert [entry.step for entry in Catalog(tmp_path).complete()] == [100, 500]


def test_what_a_rollback_left_behind_gives_its_place_to_nobody(tmp_path):
    for step in (100, 200, 300):
        commit(tmp_path, step)
    assert main(["rollback", str(tmp_path), "--to-step", "100"]) == 0
    done = adopt(save(tmp_path / "step-250", files=1))
    assert done.sequence == 4
    assert [entry.step for entry in Catalog(tmp_path).complete()] == [100, 250]


def test_a_folder_of_many_is_adopted_and_what_is_damaged_is_told(tmp_path, capsys):
    root = tmp_path / "root"
    for step in (100, 20, 3):
        save(root / f"step-{step}", files=1)
    (root / "step-20" / "__0_0.distcp").unlink()
    (root / "other").mkdir()
    for kind in ("tmp", "trash"):  # of a save that runs, of a prune
        shutil.copytree(root / "step-3", root / f"step-0000000004.{kind}-0a1b2c3d-1")
    assert [each.name for each in candidates(root)] == ["step-3", "step-20", "step-100"]
    assert main(["adopt", str(root)]) == 4
    told = capsys.readouterr()
    assert [line.partition(" -> ")[0] for line in told.out.splitlines()] == [f"{root}/step-3", f"{root}/step-100"]
    assert f"{root}/step-20 was not adopted: " in told.err
    assert [entry.sequence for entry in Catalog(root).complete()] == [1, 2]
    with pytest.raises(ckptman.ConfigError, match="a folder that is not a checkpoint yet, or no longer: rename"):
        adopt(root / "step-0000000004.tmp-0a1b2c3d-1")
    assert main(["adopt", str(root), "--json"]) == 4
    assert json.loads(capsys.readouterr().out) == {
        "adopted": [],
        "refused": [
            {"path": f"{root}/step-20", "why": f"{root}/step-20: __0_0.distcp is missing: bring it back from a copy"}
        ],
    }
    assert main(["adopt", str(tmp_path / "root" / "other")]) == 3


@pytest.mark.slow
def test_one_that_cannot_be_entered_or_written_keeps_no_other_from_it(tmp_path):
    root = tmp_path / "root"
    for step in (1, 2, 3):
        save(root / f"step-{step}", files=1)
    (root / "lost+found").mkdir(mode=0)
    (root / "step-1").chmod(0)
    (root / "step-2").chmod(0o555)
    try:
        ended = unprivileged.ckptman("adopt", root, "--json")
    finally:
        for path in root.iterdir():
            path.chmod(0o755)
    assert ended.returncode == 10
    told = json.loads(ended.stdout)
    assert [each["step"] for each in told["adopted"]] == [3]
    refused = {each["path"]: each["why"] for each in told["refused"]}
    assert list(refused) == [str(root / "step-1"), str(root / "step-2")]
    assert "Permission denied" in refused[str(root / "step-1")]
    assert "cannot be written to, and files are put beside its own" in refused[str(root / "step-2")]
    assert holds(root).keys() == {3}
    assert sorted(files(root / "step-2")) == [".metadata", "__0_0.distcp"]


@pytest.mark.slow
def test_where_the_folder_cannot_be_renamed_nothing_is_put_beside(folder):
    before = files(folder)
    folder.parent.chmod(0o555)
    try:
        ended = unprivileged.ckptman("adopt", folder)
    finally:
        folder.parent.chmod(0o755)
    assert ended.returncode == 10
    assert f"{folder.parent} cannot be written to, and the folder would be renamed there" in ended.stderr
    assert files(folder) == before


def test_what_is_not_there_and_which_one_of_several(folder, capsys):
    assert main(["adopt", str(folder.parent / "nix")]) == 3
    assert f"there is no {folder.parent}/nix" in capsys.readouterr().err
    assert main(["adopt", str(folder.parent), "--step", "3"]) == 2
    assert f"{folder.parent} is a folder of them: name {folder}" in capsys.readouterr().err
    shutil.copytree(folder, folder.with_name("step-2000"))
    assert main(["adopt", str(folder.parent), "--step", "3"]) == 2
    assert "name one of the 2 in it" in capsys.readouterr().err


# ---- what is refused ---------------------------------------------------------------------------------------------


def linked(folder, target):
    (folder / "__0_1.distcp").rename(folder / "elsewhere")
    (folder / "__0_1.distcp").symlink_to(target)


def save_a_slice(folder):
    shutil.rmtree(folder)
    dcp.save({"w": torch.ones(2), "x": slice(1)}, checkpoint_id=folder)


DAMAGE = {
    "does not match its checksum": lambda folder: flip_byte(folder / "__0_0.distcp"),
    "outside of its file": lambda folder: os.truncate(folder / "__0_0.distcp", 100),
    "__0_1.distcp is missing": lambda folder: (folder / "__0_1.distcp").unlink(),
    "has no .metadata": lambda folder: (folder / ".metadata").unlink(),
    "asks for shutil.rmtree": lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(shutil.rmtree)),
    "asks for slice": save_a_slice,
    "index.json is in the way": lambda folder: (folder / "index.json").write_text("mine"),
    "__0_1.distcp is a link": lambda folder: linked(folder, "elsewhere"),
    "__0_1.distcp": lambda folder: linked(folder, "nowhere"),
}
OTHER_ERRORS = {"has no .metadata": ckptman.NotFoundError, "index.json is in the way": ckptman.ExistsError}


@pytest.mark.parametrize("told", DAMAGE)
def test_what_is_damaged_is_refused_and_stays_as_it_was(folder, told):
    DAMAGE[told](folder)
    before = names_and_links(folder)
    with pytest.raises(OTHER_ERRORS.get(told, ckptman.CorruptError), match=told):
        adopt(folder)
    assert names_and_links(folder) == before


def test_other_names_for_data_and_links_to_the_folder_are_refused(folder, tmp_path):
    (tmp_path / "step-5").symlink_to(folder)
    with pytest.raises(ckptman.ConfigError, match="is a link: name the folder"):
        adopt(tmp_path / "step-5")
    folder.with_name("step-0000001000").mkdir()
    with pytest.raises(ckptman.ExistsError, match="exists already, so step-1000 cannot be that step"):
        adopt(folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = info.relative_path.replace("__0_1", "__00_1")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (folder / "__0_1.distcp").rename(folder / "__00_1.distcp")
    with pytest.raises(ckptman.CorruptError, match=r"keeps data in __00_1\.distcp"):
        adopt(folder, 3)


def test_a_save_of_the_same_step_is_never_covered_up(folder, tmp_path):
    commit(folder.parent, 1000)
    final = folder.with_name("step-0000001000")
    aside = final.rename(final.with_name(f"{final.name}.old-0a1b2c3d"))  # between the two renames of a commit
    before = files(folder)
    with pytest.raises(ckptman.ExistsError, match=r"\.old-0a1b2c3d exists already, so step-1000 cannot be that step"):
        adopt(folder)
    shutil.copytree(folder, final)
    with pytest.raises(ckptman.ExistsError, match=r"\.old-0a1b2c3d exists already"):
        adopt(final)
    shutil.rmtree(final)
    aside.rename(tmp_path / "aside")

    once = iter([True])  # it is called from several threads

    def run_saves(count):
        if next(once, False):
            commit(folder.parent, 1000)

    with pytest.raises(ckptman.ExistsError, match="exists already, so step-1000 cannot be that step"):
        adopt(folder, done=run_saves)
    assert files(folder) == before


def test_a_writer_that_is_not_done_is_noticed(folder):
    touched = []

    def touch(count):
        if not touched:
            touched.append(os.utime(folder / "__0_0.distcp"))

    with pytest.raises(ckptman.CorruptError, match="was written to while it was read"):
        adopt(folder, done=touch)
    assert not (folder / "manifest.json").exists()


# ---- killed, and out of space ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("error", [None, errno.ENOSPC])
def test_wherever_it_ends_the_files_are_what_they_were_and_it_can_be_run_again(plain, error, tmp_path):
    original = files(plain)
    reached = 0
    for number, fault in enumerate(faults(error)):
        root = tmp_path / str(number)
        folder = Path(shutil.copytree(plain, root / "step-1000"))
        disk = FaultyDisk(fault)
        try:
            with on_disk(disk):
                adopt(folder)
        except (Death, OSError) as ending:
            assert error is None or isinstance(ending, OSError)
        reached += disk.struck
        (there,) = root.iterdir()
        now = files(there)
        assert {name: now[name] for name in original} == original
        if error is not None and disk.struck and there == folder and "manifest.json" not in now:
            assert now == original
        if there == folder:
            adopt(folder)
        assert holds(root).keys() == {1000}
        assert not [name for name in files(root / "step-0000001000") if ".tmp-" in name]
        if not disk.struck:
            break
    assert reached > 20

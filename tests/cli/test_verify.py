"""`ckptman verify`: what it says of each kind of checkpoint, what it remembers, and how it ends.

What is damaged, and where, is proved in `integrity/test_folder_check.py` and `format/test_index.py`.
"""

import errno
import json
import os
import pty
import re
import shutil
import subprocess

import numpy as np
import pytest

from ckptman import __version__
from ckptman.catalog import catalog as catalogue
from ckptman.catalog import verified
from ckptman.catalog.catalog import Catalog
from ckptman.cli import verify_checks, verify_process
from ckptman.cli.app import main
from ckptman.cli.verify import parse_mesh, parse_world_sizes
from ckptman.errors import CkptmanError, CorruptError
from ckptman.format.index import Index
from ckptman.format.manifest import FileRecord
from ckptman.format.paths import CHUNKS, INDEX
from ckptman.integrity import folder_check
from ckptman.io import file_reader
from ckptman.io.checksums import digest_bytes
from ckptman.io.durable_files import Disk
from ckptman.verify.reports import LoadReport, PlanReport
from tests.helpers import forkserver
from tests.helpers.checkpoints import blocks_of, commit, flip_byte, index_files, note_in


def _rewrite(entry, name, data):
    """Put other bytes in a file of a checkpoint, with digests that are right."""
    manifest = Catalog(entry.path.parent).entry(entry.step).require_manifest()
    (entry.path / name).write_bytes(data)
    files = {**manifest.files, name: FileRecord(bytes=len(data), digest=digest_bytes(data))}
    (entry.path / "manifest.json").write_bytes(manifest.model_copy(update={"files": files}).to_json())


def _train(entry):
    """Other values in every data file, as training would leave."""
    for name in [name for name in entry.require_manifest().files if name.endswith(".distcp")]:
        data = bytes([entry.step % 251]) * (entry.path / name).stat().st_size
        _rewrite(entry, f"blocks-{int(name.split('_')[2]):05d}.bin", blocks_of(data))
        _rewrite(entry, name, data)


@pytest.fixture
def run(tmp_path, capsys):
    """Run a verb on the root, or on a folder in it: the exit code, and what is printed."""

    def call(*options, verb="verify", folder=""):
        capsys.readouterr()
        code = main([verb, str(tmp_path / folder), *options])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def report(run):
    """The same with --json: the exit code, and the checkpoints."""

    def call(*options, **more):
        code, out, _ = run(*options, "--json", **more)
        return code, json.loads(out, parse_constant=pytest.fail)["checkpoints"]

    return call


@pytest.fixture
def loads(monkeypatch):
    """Stands in for real processes: what they are asked for, and what they answer."""
    asked = {"problems": {}}

    def load_on(path, sizes, mesh=None, done=None, allow=()):
        asked["load"] = (path, sizes, mesh)
        for size in [*sizes, *([mesh[0] * mesh[1]] if mesh else [])]:
            if isinstance(found := asked["problems"].get(size, []), Exception):
                raise found
            if meanwhile := asked.get("meanwhile"):
                meanwhile()
            waves = ["that its ranks fit into memory together"] if size in asked.get("waves", ()) else []
            left_out = asked.get("left_out", [])
            yield LoadReport(size, found, asked.get("not_tried", {}).get(size, ""), left_out, waves)

    def plan_on(path, sizes, *more):
        asked["plan"] = (path, sizes, *more)
        for size in sizes:
            seconds = None if more[0] is None else 2**30 / more[0]
            yield PlanReport(size, asked["problems"].get(size, []), 2**30, 2**20, 2.0**20, 3, 77, 0.25, seconds)

    monkeypatch.setattr(verify_process, "load_on", load_on)
    monkeypatch.setattr(verify_process, "plan_on", plan_on)
    return asked


def _raising(code, name=None, real=None):
    """A function that raises an error of the system: for a path of this name, or for every one."""

    def refuse(path=None, *_, **__):
        if name in (None, getattr(path, "name", "")):
            raise OSError(code, os.strerror(code), str(path))
        return real(path)

    return refuse


# ---- what is damaged -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["__0_0.distcp", "manifest.json"])
def test_a_changed_byte_is_damage_and_nothing_is_proved(name, tmp_path, run):
    flip_byte(commit(tmp_path, 100).path / name)
    code, out, err = run("--threads", "1")
    assert code == 4
    (problem,) = out.splitlines()[1:]
    assert f"{name} does not match its digest" in problem
    assert "1 of 1 checkpoint damaged or incomplete: step 100" in err


def test_all_of_a_root_are_looked_at_whatever_the_first_ones_are(tmp_path, run, report):
    for step in (100, 200, 300):
        commit(tmp_path, step)
    flip_byte(tmp_path / "step-0000000100" / "__1_0.distcp")
    (tmp_path / "step-0000000200" / "__1_0.distcp").unlink()
    flip_byte(tmp_path / "step-0000000200" / ".metadata")
    assert run()[0] == 0  # the newest is good
    code, found = report("--all")
    assert (code, [each["good"] for each in found]) == (4, [False, False, True])
    assert "__1_0.distcp does not match" in found[0]["problems"][0]
    assert found[1]["problems"] == [
        ".metadata does not match its digest: its bytes have changed since they were saved",
        "__1_0.distcp is missing; what lies there: model.weight",
    ]
    assert "2 of 3 checkpoints damaged or incomplete: step 100, step 200" in run("--all")[2]


def test_json_has_everything(tmp_path, report):
    entry = commit(tmp_path, 100, rows=8192)
    code, (good,) = report()
    assert code == 0
    assert good.pop("seconds") > 0
    assert good == {
        "step": 100,
        "path": str(entry.path),
        "good": True,
        "digests": True,
        "levels": ["digests", "coverage"],
        "files": 7,
        "bytes": entry.require_manifest().total_bytes,
        "checked_bytes": entry.require_manifest().total_bytes,
        "tensors": 1,
        "world_sizes": {},
        "mesh": None,
        "nonfinite": None,
        **{name: [] for name in ("problems", "damage", "not_checked", "refused", "plans", "remarks")},
    }
    flip_byte(entry.path / "__1_0.distcp")
    code, (bad,) = report()
    assert (code, bad["good"], bad["levels"]) == (4, False, [])
    (damage,) = bad["damage"]
    assert bad["problems"] == [f"__1_0.distcp {damage.pop('what')}; what lies there: model.weight"]
    assert damage == {"file": "__1_0.distcp", "blocks": [[0, 0]], "bytes": 65536, "holds": ["model.weight"]}


def test_all_that_does_not_fit_is_damage_though_every_byte_is_right(tmp_path, run):
    entry = commit(tmp_path, 100)
    rows = {2: np.array([[number, 0, 64, 0, 0, 0, 4, 4] for number in range(3)])}
    files = index_files([(name, "float32", (4, 4)) for name in ("good", "hole", "wide")], [rows, {}])
    index = Index.model_validate_json(files[INDEX])
    lies = {"good": {}, "hole": {"shape": (5, 4)}, "wide": {"dtype": "float64"}}
    lying = {name: index.tensors[name].model_copy(update=lie) for name, lie in lies.items()}
    _rewrite(entry, CHUNKS, files[CHUNKS])
    _rewrite(entry, INDEX, index.model_copy(update={"tensors": lying}).to_json())
    code, out, _ = run()
    _, hole, wide = out.splitlines()
    assert code == 4
    assert hole == "  hole [5, 4]: element [4, 0] was saved 0 times, not once"
    assert "wide: chunk 0 of 1 has a payload that does not fit its container" in wide
    away = {"model.0": {"file": "../../etc/passwd", "offset": 0, "bytes": 16}}
    _rewrite(entry, INDEX, json.dumps({**index.model_dump(), "objects": away}).encode())
    code, out, _ = run()
    assert code == 4
    assert "which the manifest does not name" in out


def test_a_damaged_one_is_not_loaded(tmp_path, run, monkeypatch):
    flip_byte(commit(tmp_path, 100).path / "__0_0.distcp")
    monkeypatch.setattr(subprocess, "Popen", pytest.fail)
    assert run("--world-size", "1,2")[0] == 4


# ---- loads and plans -------------------------------------------------------------------------------------------------


def test_loading_is_asked_for_and_remembered(tmp_path, loads, run):
    entry = commit(tmp_path, 100)
    loads["waves"] = (2,)
    code, out, _ = run("--world-size", "1,2", "--mesh", "2x4")
    assert (code, loads["load"]) == (0, (entry.path, [1, 2], (2, 4)))
    lines = out.splitlines()
    assert lines[1:5] == [
        "  on 1 process: loads, bit for bit what was saved",
        "  on 2 processes: loads, bit for bit what was saved",
        "  on 8 processes (2 x 4): loads, bit for bit what was saved",
        "  remark: on 2 processes not proved: that its ranks fit into memory together",
    ]
    assert "  loading   on 1, 2, 8 (2 x 4): processes of their own loaded it, bit for bit what was saved" in lines
    note = note_in(entry.path)
    assert (note.world_sizes, note.meshes, note.ckptman_version) == ((1, 2), ((2, 4),), __version__)


def test_what_does_not_load_is_7_and_takes_the_note_back(tmp_path, loads, run):
    entry = commit(tmp_path, 100)
    assert run()[0] == 0
    assert note_in(entry.path) is not None
    loads["problems"] = {2: ["rank 1 of 2: model.weight: \x1b[31mdiffers"]}
    code, out, err = run("--world-size", "1,2")
    assert code == 7
    assert "    rank 1 of 2: model.weight: \\x1b[31mdiffers\n" in out
    assert err == "Error: step 100 does not load on 2 processes as it was saved: see the lines above\n"
    assert note_in(entry.path) is None
    loads["problems"] = {1: CorruptError("it cannot be read")}
    assert run("--world-size", "1,2")[0] == 4


def test_a_plan_reads_no_tensor(tmp_path, loads, run, report):
    entry = commit(tmp_path, 100)
    flip_byte(entry.path / "__0_0.distcp")
    options = ["--plan-only", "--world-size", "1024,4096"]
    code, out, _ = run(*options, "--bandwidth", "0.5GiB/s")
    assert (code, loads["plan"]) == (0, (entry.path, [1024, 4096], 2**29, None, None))
    lines = out.splitlines()
    assert lines[0].endswith("of the right sizes; 1 tensor, all complete")
    each = "can be planned; 1.0 GiB in all, at most 1.0 MiB from 3 files a rank; a load takes about 2 s"
    assert lines[1:3] == [f"  on 1,024 ranks: {each}", f"  on 4,096 ranks: {each}"]
    assert "  digests   the bytes of the tensors were not read: leave out --plan-only" in lines
    note = note_in(entry.path)
    assert (note.levels, note.plan_world_sizes, note.every_byte) == (("coverage",), (1024, 4096), False)
    planned = "  planning  onto 8 (2 x 4), 1,024: what each rank reads"
    assert planned in run("--plan-only", "--world-size", "8,1024", "--mesh", "2x4")[1]
    loads["problems"] = {1024: ["rank 7: model.weight is not covered"]}
    code, (found,) = report(*options)
    assert (code, found["good"], found["levels"]) == (7, False, ["coverage"])
    assert [plan["world_size"] for plan in found["plans"]] == [1024, 4096]
    assert "step 100 cannot be planned onto 1024 ranks" in run(*options)[2]
    (entry.path / "__1_0.distcp").unlink()
    assert run(*options)[0] == 4


A_RATE = "a rate above 0 with its unit, such as 5GB/s"
TOO_MANY = "more than 8,192 ranks are not loaded, which would take hours: with --plan-only"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--plan-only", "onto how many ranks"),
        ("--bandwidth 5GB/s", "are for --plan-only"),
        ("--plan-only --world-size 8 --bandwidth 5", f"--bandwidth: {A_RATE}"),
        ("--plan-only --world-size 8 --bandwidth 0GB/s", f"--bandwidth: {A_RATE}"),
        ("--plan-only --world-size 8 --rank-bandwidth x", "--rank-bandwidth: a rate"),
        ("--mesh 2", "--mesh: replicas x shards, such as 2x4"),
        ("--mesh 0x4", "--mesh: replicas x shards, such as 2x4"),
        ("--threads -1", "at least 1"),
        ("--threads 5000", ""),
        ("--world-size 2000000", ""),
        ("--mesh 2000x2000", ""),
        ("--world-size 2,8193", TOO_MANY),
        ("--mesh 2x4097", TOO_MANY),
    ],
)
def test_wrong_usage_says_what_is_wrong(options, said, tmp_path, run, loads):
    commit(tmp_path, 100)
    code, _, err = run(*options.split())
    assert code == 2
    assert said in err
    assert "load" not in loads


def test_what_could_not_be_tried_is_neither_good_nor_bad(tmp_path, loads, run, report):
    entry = commit(tmp_path, 100)
    assert run("--world-size", "8192")[0] == 0
    loads["not_tried"] = {8: "each rank needs 300 bytes of memory, and 200 are free"}
    code, out, err = run("--world-size", "2,8")
    assert code == 10
    assert "  not proved: that it loads on 8 processes: each rank needs 300 bytes of memory" in out
    assert "could not be read, or not tried: step 100" in err
    note = note_in(entry.path)
    assert (note.every_byte, note.world_sizes) == (True, (2, 8192))  # what was proved stays proved
    loads["problems"] = {2: CkptmanError("the loading check ended with exit code -9")}
    code, (found,) = report("--world-size", "2")
    assert (code, found["good"]) == (10, False)
    assert found["not_checked"] == ["that it loads: the loading check ended with exit code -9"]
    assert note_in(entry.path) is not None


def test_pickles_that_could_not_be_looked_at_are_told_with_the_reason(tmp_path, monkeypatch, run):
    def fail(*_):
        raise CkptmanError("the loading check ended with exit code -9")

    commit(tmp_path, 100)
    monkeypatch.setattr(folder_check, "only_pickled", lambda *_: True)
    monkeypatch.setattr(verify_process, "refused_on", fail)
    code, out, _ = run()
    assert code == 10
    why = "that what is pickled in it loads: the loading check ended with exit code -9"
    assert f"  not proved: {why}\n" in out


def test_a_size_on_which_a_tensor_was_left_out_is_not_noted(tmp_path, loads, run):
    entry = commit(tmp_path, 100)
    loads["left_out"] = ["q.weight"]
    code, out, _ = run("--world-size", "2")
    assert code == 0
    assert "loads, bit for bit what was saved, but for 1 tensor" in out
    assert "not proved: q.weight load, as quantized tensors cannot be sharded" in out
    assert note_in(entry.path).world_sizes == ()


def test_world_sizes_and_meshes_as_they_are_written():
    assert parse_world_sizes(None) == []
    assert parse_world_sizes("1, 2,4,2") == [1, 2, 4]
    assert parse_mesh(None) is None
    assert parse_mesh("2x4") == (2, 4)


# ---- what is remembered ----------------------------------------------------------------------------------------------


def test_what_was_verified_is_listed(tmp_path, loads, run, report):
    for step in (100, 200, 300):
        commit(tmp_path, step)
    assert "verified" not in run(verb="list")[1]
    assert run("--step", "200", "--world-size", "1,2,3,4,5", "--mesh", "2x3")[0] == 0
    assert run("--step", "300", "--plan-only", "--world-size", "64")[0] == 0
    head, *lines = run(verb="list")[1].splitlines()
    assert head.split()[-2:] == ["verified", "state"]
    cells = [re.split(" {2,}", line.strip())[-2:] for line in lines[:3]]
    assert cells == [["-", "complete"], ["0 s ago, on 1 2 3 4 ...", "complete"], ["plan only", "complete"]]
    first, second, third = (each["verified"] for each in report(verb="list")[1])
    assert first is None
    assert second.pop("time_seconds") > 1_700_000_000
    assert second == {
        "format_version": 1,
        "ckptman_version": __version__,
        "levels": ["digests", "coverage"],
        "world_sizes": [1, 2, 3, 4, 5],
        "meshes": [[2, 3]],
        "plan_world_sizes": [],
    }
    assert (third["levels"], third["plan_world_sizes"]) == (["coverage"], [64])


def test_a_data_file_that_was_replaced_was_not_verified(tmp_path, run):
    one, other = commit(tmp_path, 100), commit(tmp_path, 200)
    assert run("--all")[0] == 0
    shutil.copy2(one.path / "__0_0.distcp", tmp_path / "file")
    (tmp_path / "file").rename(other.path / "__0_0.distcp")
    assert note_in(other.path) is None
    assert not Catalog(tmp_path).entry(200).record().verified


@pytest.mark.slow
def test_damage_takes_the_note_back(tmp_path, run):
    entry = commit(tmp_path, 100)
    assert run()[0] == 0
    path = entry.path / "__0_0.distcp"
    found = path.stat()
    flip_byte(path)
    assert note_in(entry.path) is None  # somebody wrote to it
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert note_in(entry.path) is not None  # as after the disk itself turned a bit: nobody looked
    assert run()[0] == 4
    note = note_in(entry.path)
    assert (note.levels, note.every_byte, note.world_sizes) == ((), False, ())
    assert note.damaged.startswith("__0_0.distcp does not match its digest: ")
    assert run("--plan-only", "--world-size", "2")[0] == 7  # looks at none of that
    assert note_in(entry.path) == note
    flip_byte(path)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert run()[0] == 0
    note = note_in(entry.path)
    assert (note.every_byte, note.damaged) == (True, "")


def test_what_was_found_damaged_is_listed_and_counts_for_nothing(tmp_path, run, report):
    for step in (10, 20, 30):
        commit(tmp_path, step)
    flip_byte(tmp_path / "step-0000000030" / "__0_0.distcp")
    assert run()[0] == 4
    listed = run(verb="list")[1]
    assert re.search(r"30 .*damaged: __0_0.distcp does not match its digest", listed)
    assert "2 complete checkpoints" in listed
    assert "the newest is of step 20. 1 does not count." in listed
    assert "verified" not in listed
    *_, last = report(verb="list")[1]
    assert last["verified"] is None
    assert last["damaged"].startswith("__0_0.distcp does not match")
    assert re.search(r"verified +-\n +damaged +__0_0.distcp does not match its digest", run(verb="show")[1])
    plan = json.loads(run("--keep-last", "1", "--json", verb="prune")[1])
    assert [(each["step"], each["keep"]) for each in plan["checkpoints"]] == [(10, False), (20, True)]
    ((ignored, why),) = [(each["step"], each["why"]) for each in plan["ignored"]]
    assert ignored == 30
    assert why.startswith("damaged: __0_0.distcp does not match its digest")


def test_a_folder_that_cannot_be_written_is_verified_all_the_same(tmp_path, monkeypatch, run):
    entry = commit(tmp_path, 100)
    with monkeypatch.context() as patch:
        patch.setattr(Disk, "replace_file", _raising(errno.EROFS))
        code, out, _ = run()
    assert code == 0
    assert re.search("  remark: that it was verified could not be noted: .*Read-only file system", out)
    assert note_in(entry.path) is None
    assert run()[0] == 0
    flip_byte(entry.path / "__0_0.distcp")
    monkeypatch.setattr(Disk, "replace_file", _raising(errno.EROFS))
    code, out, _ = run()
    assert code == 4
    assert "  remark: that it is damaged, and no longer verified, could not be noted: " in out


# ---- what cannot be read, and what changes meanwhile -----------------------------------------------------------------


@pytest.mark.parametrize("harm", ["cut", "link"])
def test_a_newest_one_that_does_not_count_is_not_passed_over(tmp_path, harm, run, report):
    for step in (10, 20, 30):
        commit(tmp_path, step)
    (tmp_path / "step-0000000010" / "manifest.json").unlink()  # older than the newest: for --all
    newest = tmp_path / "step-0000000030"
    if harm == "cut":
        os.truncate(newest / "manifest.json", 100)
    else:
        newest.rename(tmp_path / "elsewhere")
        newest.symlink_to("elsewhere")
    code, out, err = run()
    assert code == 4
    assert re.findall("^step [^,]*", out, re.MULTILINE) == ["step 30: damaged", "step 20: good"]
    assert "1 of 2 checkpoints damaged or incomplete: step 30." in err
    code, found = report()
    assert (code, [each["step"] for each in found]) == (4, [30, 20])
    assert run("--step", "20")[0] == 0
    assert run("--all")[0] == 4


def test_one_that_cannot_be_read_keeps_nobody_from_looking_at_the_others(tmp_path, monkeypatch, run):
    for step in (10, 20, 30):
        commit(tmp_path, step)
    refuse = _raising(errno.EACCES, "step-0000000020", catalogue.read_manifest)
    monkeypatch.setattr(catalogue, "read_manifest", refuse)
    listed = run(verb="list")[1]
    assert "does not count: it cannot be read (Permission denied)" in listed
    assert "2 complete checkpoints" in listed
    code, out, _ = run("--all")
    assert code == 10
    assert "step 20: not proved" in out
    assert "step-0000000020 cannot be read (Permission denied): check its permissions" in out
    assert out.count(": good, ") == 2
    assert run("--step", "10")[0] == 0
    assert run()[0] == 10  # it may be the newest
    for verb, *options in (["show", "--step", "20"], ["show"], ["prune", "--keep-last", "1"], ["diff"]):
        assert run(*options, verb=verb)[0] == 10  # who acts on what is the newest has to know
    code, _, err = run("--steps", "10,30", verb="diff")
    assert code != 10
    assert "cannot be read" not in err
    assert len(list(tmp_path.glob("step-*"))) == 3


def test_what_may_not_be_read_is_neither_good_nor_damaged(tmp_path, monkeypatch, run):
    entry = commit(tmp_path, 100)
    real = file_reader.open_regular
    assert run()[0] == 0
    monkeypatch.setattr(file_reader, "open_regular", _raising(errno.EACCES))
    code, out, err = run()
    assert code == 10
    assert out.startswith("step 100: not proved, ")
    assert "  not proved: __0_0.distcp cannot be read: Permission denied\n" in out
    assert "1 of 1 checkpoint could not be read, or not tried: step 100." in err
    assert note_in(entry.path) is not None  # nothing was found that speaks against it
    flip_byte(entry.path / "__0_0.distcp")
    monkeypatch.setattr(file_reader, "open_regular", _raising(errno.EACCES, "__1_0.distcp", real))
    assert run()[0] == 4  # damage counts though not all could be read
    note = note_in(entry.path)
    assert (bool(note.damaged), note.every_byte) == (True, False)


def test_one_that_is_deleted_while_it_is_loaded_is_gone_and_not_bad(tmp_path, loads, run):
    entry = commit(tmp_path, 100)
    loads["problems"] = {2: ["rank 0 of 2: __0_0.distcp is missing"]}
    loads["meanwhile"] = lambda: shutil.rmtree(entry.path)
    code, out, _ = run("--world-size", "2")
    assert code == 3
    assert "is missing" not in out
    assert "it was deleted while it was verified" in out


def test_a_checkpoint_that_is_deleted_meanwhile_is_not_damaged(tmp_path, monkeypatch, run):
    entry = commit(tmp_path, 100)
    commit(tmp_path, 200)
    real = folder_check.scan

    def late(folder, *rest, **more):
        if folder == entry.path:
            folder.rename(tmp_path / "step-0000000100.trash-x")
        real(folder, *rest, **more)

    monkeypatch.setattr(folder_check, "scan", late)
    code, out, _ = run("--all")
    assert code == 0
    assert "step 100: not checked, it was deleted while it was verified\n" in out
    assert "step 200: good" in out
    (tmp_path / "step-0000000100.trash-x").rename(entry.path)
    code, _, err = run("--step", "100")
    assert code == 3
    assert "step 100: it was deleted while it was verified" in err


@pytest.mark.parametrize(
    ("saved_again", "code", "said"),
    [
        (False, 10, "step 100: not checked, its manifest cannot be read any more (Stale file handle)"),
        (True, 3, "its files changed while it was verified"),
    ],
)
def test_what_changes_after_it_was_read_is_not_noted(saved_again, code, said, tmp_path, monkeypatch, run):
    entry = commit(tmp_path, 100)
    real = verify_checks._check_coverage

    def late(*rest):
        real(*rest)
        if saved_again:
            shutil.rmtree(entry.path)
            commit(tmp_path, 100, sequence=9)
        else:
            monkeypatch.setattr(verified, "identify", _raising(errno.ESTALE))

    monkeypatch.setattr(verify_checks, "_check_coverage", late)
    found, out, _ = run()
    assert found == code
    assert said in out
    assert not (entry.path / "verified.json").exists()


# ---- what is shown ---------------------------------------------------------------------------------------------------


def test_parameters_that_stood_still_are_a_remark(tmp_path, run, report):
    commit(tmp_path, 100, rows=8192)
    commit(tmp_path, 200, rows=8192)
    _train(commit(tmp_path, 300, rows=8192))
    code, out, _ = run("--all")
    assert code == 0
    lines = out.splitlines()
    said = "its parameters are those of step 100, bit for bit (such as model.weight), although the step is another"
    assert [number for number, line in enumerate(lines) if line.startswith("  remark")] == [2]
    assert lines[2].startswith(f"  remark: {said}")
    code, (found,) = report(folder="step-0000000200")
    assert (code, found["good"]) == (0, True)
    assert said in found["remarks"][0]


def test_names_from_a_checkpoint_reach_the_terminal_escaped(tmp_path, run):
    entry = commit(tmp_path, 100)
    evil = "\x1b]0;owned\x07\u202ename"
    rows = {2: np.array([[0, 0, 64, 0, 0, 0, 4, 4]])}
    for name, data in index_files([(evil, "float32", (4, 4))], [rows, {}]).items():
        _rewrite(entry, name, data)
    flip_byte(entry.path / "__0_0.distcp")
    (entry.path / "core\x1b[2J").touch()
    code, out, err = run()
    assert code == 4
    assert not {"\x1b", "\x07", "\u202e"} & set(out + err)
    assert "what lies there: \\x1b]0;owned\\x07\\u202ename" in out
    assert "core\\x1b[2J is not in the manifest" in out


def test_a_screen_is_not_flooded(tmp_path, run):
    for path in commit(tmp_path, 100, ranks=100, rows=400).path.glob("*.distcp"):
        path.unlink()
    code, out, _ = run()
    lines = out.splitlines()
    assert (code, len(lines)) == (4, 42)
    assert lines[-1] == "  and 60 more: --json lists all of them"


COMMAND = ("-c", "import ckptman.cli; ckptman.cli.main()", "verify")


def test_two_at_once_agree(tmp_path):
    commit(tmp_path, 100, rows=4096)
    running = [forkserver.Python(*COMMAND, tmp_path, "--json", stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for each in running:
        out, _ = each.communicate(timeout=60)
        assert each.returncode == 0
        assert json.loads(out)["checkpoints"][0]["remarks"] == []
    assert note_in(tmp_path / "step-0000000100") is not None


def test_a_terminal_sees_a_bar_that_goes_away(tmp_path):
    commit(tmp_path, 100)
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    ran = forkserver.run(*COMMAND, tmp_path, stdout=subprocess.PIPE, stderr=theirs, env=env)
    os.close(theirs)
    drawn = os.read(ours, 65536)
    os.close(ours)
    assert ran.returncode == 0
    assert b"step 100" in drawn
    assert drawn.rstrip().endswith(b"\x1b[2K")  # the last thing done is to clear the line
    assert ran.stdout.startswith(b"step 100: good")

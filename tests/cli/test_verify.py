"""`ckptman verify`: what it says of each kind of checkpoint, what it remembers, and how it ends."""

import errno
import json
import os
import pty
import re
import shutil
import subprocess

import pytest

from ckptman import __version__
from ckptman.cli.app import main
from ckptman.cli.verify import parse_mesh
from ckptman.errors import CkptmanError, CorruptError
from ckptman.storage.catalog import catalog as catalogue
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.format.index import Index
from ckptman.storage.format.manifest import FileRecord, read_manifest
from ckptman.storage.format.paths import INDEX
from ckptman.storage.io import file_reader
from ckptman.storage.io.checksums import digest_bytes
from ckptman.storage.io.durable_files import Disk
from ckptman.tools.verify import check as verify_checks
from ckptman.tools.verify import verify_process
from ckptman.tools.verify.reports import LoadReport, PlanReport
from tests.helpers.checkpoints import blocks_of, commit, flip_byte, note_in
from tests.helpers.forkserver import run


def _rewrite(entry, name, data):
    """Put other bytes in a file of a checkpoint, with digests that are right."""
    manifest = Catalog(entry.path.parent).entry(entry.step).require_manifest()
    (entry.path / name).write_bytes(data)
    files = {**manifest.files, name: FileRecord(bytes=len(data), digest=digest_bytes(data))}
    (entry.path / "manifest.json").write_bytes(manifest.model_copy(update={"files": files}).to_json())


def _change(entry, step):
    """Other values in every data file, as training would leave."""

    for name in [name for name in entry.require_manifest().files if name.endswith(".distcp")]:
        data = bytes([step % 251]) * (entry.path / name).stat().st_size
        rank = int(name.split("_")[2])
        _rewrite(entry, f"blocks-{rank:05d}.bin", blocks_of(data))
        _rewrite(entry, name, data)


def _forbid(monkeypatch, module, function, name):
    """Let a function that opens paths refuse those of this name."""
    real = getattr(module, function)

    def refuse(path, *rest, **more):
        if path.name == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *rest, **more)

    monkeypatch.setattr(module, function, refuse)


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


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ("equal", "  replicas  what several ranks held was the same on all of them, as their run saw"),
        ("differ", "  replicas  ranks differed in what they should have alike, and parts of each were saved"),
        (None, "  replicas  whether ranks held the same where one of them saved for all: nobody compared it"),
    ],
)
def test_it_says_what_a_run_saw_of_its_replicas(tmp_path, ends, found, line):
    entry = commit(tmp_path, 100)
    path = entry.path / "manifest.json"
    path.write_bytes(read_manifest(entry.path).model_copy(update={"replicas": found}).to_json())
    lines = ends(0, "verify", tmp_path).out.splitlines()
    assert (lines.index(line) < lines.index("Not proved")) == (found == "equal")
    [told] = json.loads(ends(0, "verify", tmp_path, "--json").out)["checkpoints"]
    assert told["replicas"] == found


def test_all_of_a_root_are_looked_at_whatever_the_first_ones_are(tmp_path, ends):
    entries = [commit(tmp_path, step) for step in (100, 200, 300)]
    flip_byte(entries[0].path / "__1_0.distcp")
    (entries[1].path / "__1_0.distcp").unlink()
    flip_byte(entries[1].path / ".metadata")
    assert main(["verify", str(tmp_path)]) == 0  # the newest is good
    told = ends(4, "verify", tmp_path, "--all", "--json")
    found = {each["step"]: each for each in json.loads(told.out)["checkpoints"]}
    assert [found[step]["good"] for step in (100, 200, 300)] == [False, False, True]
    assert "__1_0.distcp does not match" in found[100]["problems"][0]
    assert found[200]["problems"] == [
        ".metadata does not match its digest: its bytes have changed since they were saved",
        "__1_0.distcp is missing; what lies there: model.weight",
    ]
    assert "2 of 3 checkpoints damaged or incomplete: step 100, step 200" in told.err


def test_a_damaged_one_is_not_loaded(tmp_path, monkeypatch):
    flip_byte(commit(tmp_path, 100).path / "__0_0.distcp")
    monkeypatch.setattr(subprocess, "Popen", pytest.fail)
    assert main(["verify", str(tmp_path), "--world-size", "1,2"]) == 4


def test_loading_is_asked_for_and_remembered(tmp_path, loads, capsys):
    entry = commit(tmp_path, 100)
    loads["waves"] = (2,)
    assert main(["verify", str(tmp_path), "--world-size", "1,2", "--mesh", "2x4"]) == 0
    assert loads["load"] == (entry.path, [1, 2], (2, 4))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:5] == [
        "  on 1 process: loads, bit for bit what was saved",
        "  on 2 processes: loads, bit for bit what was saved",
        "  on 8 processes (2 x 4): loads, bit for bit what was saved",
        "  remark: on 2 processes not proved: that its ranks fit into memory together",
    ]
    assert "  loading   on 1, 2, 8 (2 x 4): processes of their own loaded it, bit for bit what was saved" in lines
    note = note_in(entry.path)
    assert (note.world_sizes, note.meshes, note.ckptman_version) == ((1, 2), ((2, 4),), __version__)


def test_what_does_not_load_is_7_and_takes_the_note_back(tmp_path, loads, ends):
    entry = commit(tmp_path, 100)
    assert main(["verify", str(tmp_path)]) == 0
    assert note_in(entry.path) is not None
    loads["problems"] = {2: ["rank 1 of 2: model.weight: \x1b[31mdiffers"]}
    told = ends(7, "verify", tmp_path, "--world-size", "1,2")
    assert "    rank 1 of 2: model.weight: \\x1b[31mdiffers\n" in told.out
    assert told.err == "Error: step 100 does not load on 2 processes as it was saved: see the lines above\n"
    assert note_in(entry.path) is None
    loads["problems"] = {1: CorruptError("it cannot be read")}
    assert main(["verify", str(tmp_path), "--world-size", "1,2"]) == 4


def test_a_plan_reads_no_tensor(tmp_path, loads, capsys, ends):
    entry = commit(tmp_path, 100)
    flip_byte(entry.path / "__0_0.distcp")
    command = ["verify", str(tmp_path), "--plan-only", "--world-size", "1024,4096"]
    assert main([*command, "--bandwidth", "0.5GiB/s"]) == 0
    assert loads["plan"] == (entry.path, [1024, 4096], 2**29, None, None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("of the right sizes; 1 tensor, all complete")
    each = "can be planned; 1.0 GiB in all, at most 1.0 MiB from 3 files a rank; a load takes about 2 s"
    assert lines[1:3] == [f"  on 1,024 ranks: {each}", f"  on 4,096 ranks: {each}"]
    assert "  digests   the bytes of the tensors were not read: leave out --plan-only" in lines
    note = note_in(entry.path)
    assert (note.levels, note.plan_world_sizes, note.every_byte) == (("coverage",), (1024, 4096), False)
    loads["problems"] = {1024: ["rank 7: model.weight is not covered"]}
    told = ends(7, *command, "--json")
    (found,) = json.loads(told.out)["checkpoints"]
    assert (found["good"], found["levels"]) == (False, ["coverage"])
    assert [plan["world_size"] for plan in found["plans"]] == [1024, 4096]
    assert "step 100 cannot be planned onto 1024 ranks" in told.err
    (entry.path / "__1_0.distcp").unlink()
    assert main(command) == 4


def test_what_could_not_be_tried_is_neither_good_nor_bad(tmp_path, loads, ends):
    entry = commit(tmp_path, 100)
    loads["not_tried"] = {8: "each rank needs 300 bytes of memory, and 200 are free"}
    told = ends(10, "verify", tmp_path, "--world-size", "2,8")
    assert "  not proved: that it loads on 8 processes: each rank needs 300 bytes of memory" in told.out
    assert "could not be read, or not tried: step 100" in told.err
    note = note_in(entry.path)
    assert (note.every_byte, note.world_sizes) == (True, (2,))  # what was proved stays proved
    loads["problems"] = {2: CkptmanError("the loading check ended with exit code -9")}
    (report,) = json.loads(ends(10, "verify", tmp_path, "--world-size", "2", "--json").out)["checkpoints"]
    assert report["not_checked"] == ["that it loads: the loading check ended with exit code -9"]
    assert not report["good"]
    assert note_in(entry.path) is not None


def test_pickles_that_could_not_be_looked_at_are_told_with_the_reason(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise CkptmanError("the loading check ended with exit code -9")

    commit(tmp_path, 100)
    monkeypatch.setattr("ckptman.storage.integrity.folder_check.only_pickled", lambda *_: True)
    monkeypatch.setattr(verify_process, "refused_on", fail)
    assert main(["verify", str(tmp_path)]) == 10
    why = "that what is pickled in it loads: the loading check ended with exit code -9"
    assert f"  not proved: {why}\n" in capsys.readouterr().out


def test_a_size_on_which_a_tensor_was_left_out_is_not_noted(tmp_path, loads, ends):
    entry = commit(tmp_path, 100)
    loads["left_out"] = ["q.weight"]
    out = ends(0, "verify", tmp_path, "--world-size", "2").out
    assert "loads, bit for bit what was saved, but for 1 tensor" in out
    assert "not proved: q.weight load, as quantized tensors cannot be sharded" in out
    note = note_in(entry.path)
    assert note.world_sizes == ()


@pytest.mark.slow
def test_damage_takes_the_note_back(tmp_path):
    entry = commit(tmp_path, 100)
    assert main(["verify", str(tmp_path)]) == 0
    path = entry.path / "__0_0.distcp"
    found = path.stat()
    flip_byte(path)
    assert note_in(entry.path) is None  # somebody wrote to it
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert note_in(entry.path) is not None  # as after the disk itself turned a bit: nobody looked
    assert main(["verify", str(tmp_path)]) == 4
    note = note_in(entry.path)
    assert (note.levels, note.every_byte, note.world_sizes) == ((), False, ())
    assert note.damaged.startswith("__0_0.distcp does not match its digest: ")
    assert main(["verify", str(tmp_path), "--plan-only", "--world-size", "2"]) == 7  # looks at none of that
    assert note_in(entry.path) == note
    flip_byte(path)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert main(["verify", str(tmp_path)]) == 0
    note = note_in(entry.path)
    assert (note.every_byte, note.damaged) == (True, "")


@pytest.mark.parametrize("harm", ["missing", "cut", "link"])
def test_a_newest_one_that_does_not_count_is_not_passed_over(tmp_path, harm, ends):
    for step in (10, 20, 30):
        commit(tmp_path, step)
    (tmp_path / "step-0000000010" / "manifest.json").unlink()  # older than the newest: for --all
    newest = tmp_path / "step-0000000030"
    if harm == "missing":
        (newest / "manifest.json").unlink()
    elif harm == "cut":
        os.truncate(newest / "manifest.json", 100)
    else:
        newest.rename(tmp_path / "elsewhere")
        newest.symlink_to("elsewhere")
    told = ends(4, "verify", tmp_path)
    verdicts = [line.partition(",")[0] for line in told.out.splitlines() if line.startswith("step")]
    assert verdicts == ["step 30: damaged", "step 20: good"]
    assert "1 of 2 checkpoints damaged or incomplete: step 30." in told.err
    assert [each["step"] for each in json.loads(ends(4, "verify", tmp_path, "--json").out)["checkpoints"]] == [30, 20]
    assert main(["verify", str(tmp_path), "--step", "20"]) == 0
    assert main(["verify", str(tmp_path), "--all"]) == 4


def test_one_that_cannot_be_read_keeps_nobody_from_looking_at_the_others(tmp_path, monkeypatch, ends):
    for step in (10, 20, 30):
        commit(tmp_path, step)
    for reader in ("read_manifest", "read_facts"):
        _forbid(monkeypatch, catalogue, reader, "step-0000000020")
    told = ends(10, "verify", tmp_path, "--all").out
    assert "step 20: not proved" in told
    assert "step-0000000020 cannot be read (Permission denied): check its permissions" in told
    assert told.count(": good, ") == 2
    ends(0, "verify", tmp_path, "--step", "10")
    for verb in (["verify"], ["show"], ["show", "--step", "20"], ["prune", "--keep-last", "1"], ["diff"]):
        ends(10, verb[0], tmp_path, *verb[1:])  # it may be the newest: who acts on that has to know
    assert len(list(tmp_path.glob("step-*"))) == 3


def test_a_screen_is_not_flooded(tmp_path, ends):
    entry = commit(tmp_path, 100, ranks=100, rows=400)
    for path in entry.path.glob("*.distcp"):
        path.unlink()
    lines = ends(4, "verify", tmp_path).out.splitlines()
    assert len(lines) == 42
    assert lines[-1] == "  and 60 more: --json lists all of them"


def test_a_terminal_sees_a_bar_that_goes_away(tmp_path):
    commit(tmp_path, 100)
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    ran = run("-m", "ckptman", "verify", tmp_path, stdout=subprocess.PIPE, stderr=theirs, env=environ)
    os.close(theirs)
    drawn = os.read(ours, 65536)
    os.close(ours)
    assert ran.returncode == 0
    assert b"step 100" in drawn
    assert drawn.rstrip().endswith(b"\x1b[2K")  # the last thing done is to clear the line
    assert ran.stdout.startswith(b"step 100: good")


# ---- damage ----------------------------------------------------------------------------------------------------------


def _with_half_of_a_tensor(index):
    half = index.tensors["model.weight"].model_copy(update={"count": 1})
    return index.model_copy(update={"tensors": {"model.weight": half}}).to_json()


def _with_an_object_elsewhere(index):
    away = {"model.0": {"file": "../../etc/passwd", "offset": 0, "bytes": 16}}
    return json.dumps({**index.model_dump(), "objects": away}).encode()


@pytest.mark.parametrize(
    ("lie", "told"),
    [
        (_with_half_of_a_tensor, "  model.weight [8, 4]: element [4, 0] was saved 0 times, not once"),
        (_with_an_object_elsewhere, "which the manifest does not name"),
    ],
)
def test_an_index_that_lies_is_damage_though_every_byte_is_right(lie, told, tmp_path, ends):
    entry = commit(tmp_path, 100)
    _rewrite(entry, INDEX, lie(Index.model_validate_json((entry.path / INDEX).read_bytes())))
    assert told in ends(4, "verify", tmp_path).out


# ---- what is remembered ----------------------------------------------------------------------------------------------


def test_what_was_verified_is_listed(tmp_path, loads, capsys, ends):
    for step in (100, 200, 300):
        commit(tmp_path, step)
    assert "verified" not in ends(0, "list", tmp_path).out
    assert main(["verify", str(tmp_path), "--step", "200", "--world-size", "1,2,3,4,5", "--mesh", "2x3"]) == 0
    assert main(["verify", str(tmp_path), "--step", "300", "--plan-only", "--world-size", "64,8", "--mesh", "2x4"]) == 0
    assert "  planning  onto 8 (2 x 4), 64: what each rank reads" in capsys.readouterr().out
    lines = ends(0, "list", tmp_path).out.splitlines()
    assert lines[0].split()[-2:] == ["verified", "state"]
    cells = [re.split(" {2,}", re.sub(r"\d+ s ago", "now", line.strip()))[-2:] for line in lines[1:4]]
    assert cells == [["-", "complete"], ["now, on 1 2 3 4 ...", "complete"], ["plan only", "complete"]]
    found = [each["verified"] for each in json.loads(ends(0, "list", tmp_path, "--json").out)["checkpoints"]]
    assert found[0] is None
    assert (found[1]["world_sizes"], found[1]["meshes"]) == ([1, 2, 3, 4, 5], [[2, 3]])
    assert (found[2]["levels"], found[2]["plan_world_sizes"]) == (["coverage"], [8, 64])


def test_what_was_found_damaged_is_listed_and_counts_for_nothing(tmp_path, ends):
    for step in (10, 20, 30):
        commit(tmp_path, step)
    flip_byte(tmp_path / "step-0000000030" / "__0_0.distcp")
    ends(4, "verify", tmp_path)
    told = ends(0, "list", tmp_path).out
    assert re.search(r"30 .*damaged: __0_0.distcp does not match its digest", told)
    assert "2 complete checkpoints" in told
    assert "the newest is of step 20. 1 does not count." in told
    assert "verified" not in told
    assert re.search(r"verified +-\n +damaged +__0_0.distcp does not match its digest", ends(0, "show", tmp_path).out)


def test_a_folder_that_cannot_be_written_is_verified_all_the_same(tmp_path, monkeypatch, capsys, ends):
    def refuse(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    entry = commit(tmp_path, 100)
    monkeypatch.setattr(Disk, "replace_file", refuse)
    out = ends(0, "verify", tmp_path).out
    assert "  remark: that it was verified could not be noted: " in out
    assert "Read-only file system" in out
    assert note_in(entry.path) is None
    flip_byte(entry.path / "__0_0.distcp")
    assert main(["verify", str(tmp_path)]) == 4
    assert "  remark: that it is damaged, and no longer verified, could not be noted: " in capsys.readouterr().out


# ---- meanwhile -------------------------------------------------------------------------------------------------------


@pytest.fixture
def meanwhile(monkeypatch):
    """Do something when the digests of the first checkpoint were compared."""
    real, waiting = verify_checks._check_coverage, []

    def late(*rest):
        real(*rest)
        if waiting:
            waiting.pop()()

    monkeypatch.setattr(verify_checks, "_check_coverage", late)
    return waiting.append


def test_what_is_deleted_meanwhile_is_gone_and_not_damaged(tmp_path, loads, meanwhile, ends):
    entry = commit(tmp_path, 100)
    commit(tmp_path, 200)
    meanwhile(lambda: shutil.rmtree(entry.path))
    out = ends(0, "verify", tmp_path, "--all").out
    assert "step 100: not checked, it was deleted while it was verified\n" in out
    assert "step 200: good" in out
    entry = commit(tmp_path, 300)
    meanwhile(lambda: shutil.rmtree(entry.path))
    assert "step 300: it was deleted while it was verified" in ends(3, "verify", tmp_path).err
    commit(tmp_path, 300)
    loads["problems"] = {2: ["rank 0 of 2: __0_0.distcp is missing"]}
    loads["meanwhile"] = lambda: shutil.rmtree(entry.path)
    told = ends(3, "verify", tmp_path, "--world-size", "2").out
    assert "is missing" not in told
    assert "it was deleted while it was verified" in told


def test_what_cannot_be_looked_at_any_more_is_not_gone(tmp_path, meanwhile, monkeypatch, capsys):
    def away(*rest):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    commit(tmp_path, 100)
    meanwhile(lambda: monkeypatch.setattr("ckptman.storage.catalog.verified.identify", away))
    assert main(["verify", str(tmp_path)]) == 10
    assert "step 100: not checked, its manifest cannot be read any more (Stale file handle)" in capsys.readouterr().out


def test_a_step_that_is_saved_again_meanwhile_is_not_noted(tmp_path, meanwhile, ends):
    entry = commit(tmp_path, 100)

    def again():
        shutil.rmtree(entry.path)
        commit(tmp_path, 100, sequence=9)

    meanwhile(again)
    assert "its files changed while it was verified" in ends(3, "verify", tmp_path).out
    assert not (entry.path / "verified.json").exists()


def test_what_may_not_be_read_is_not_damaged_and_hides_no_damage(tmp_path, monkeypatch, ends):

    entry = commit(tmp_path, 100)
    assert main(["verify", str(tmp_path)]) == 0
    _forbid(monkeypatch, file_reader, "open_regular", "__1_0.distcp")
    told = ends(10, "verify", tmp_path)
    assert told.out.startswith("step 100: not proved, ")
    assert "  not proved: __1_0.distcp cannot be read: Permission denied\n" in told.out
    assert "1 of 1 checkpoint could not be read, or not tried: step 100." in told.err
    assert note_in(entry.path) is not None  # nothing was found that speaks against it
    flip_byte(entry.path / "__0_0.distcp")
    assert main(["verify", str(tmp_path)]) == 4
    note = note_in(entry.path)
    assert (bool(note.damaged), note.every_byte) == (True, False)


def test_meshes_as_they_are_written():
    assert (parse_mesh(None), parse_mesh("2x4")) == (None, (2, 4))

"""`ckptman prune` over several roots, with the rules of the run, and what it refuses to touch; pins."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptman.catalog.catalog import Catalog
from ckptman.catalog.pins import PINNED, read_pin
from ckptman.catalog.reader_lease import lease
from ckptman.catalog.stored_policy import read_policy, write_policy
from ckptman.catalog.verified import VERIFIED
from ckptman.catalog.writer_lock import owner_path, this_process
from ckptman.cli import console
from ckptman.cli.app import main
from ckptman.format.paths import retention_path, run_folder, step_folder
from ckptman.policies.retention_rules import AtMost, KeepBest, KeepLast, KeepSteps, RetentionPolicy
from tests.helpers import unprivileged
from tests.helpers.checkpoints import commit, steps_of


def make(root, *steps):
    for step in steps:
        commit(root, step, metrics={"loss": 1000 / step, "nan": float("nan")})
    return root


def kept(root):
    return steps_of(Catalog(root).scan())


def said(capsys, *arguments):
    capsys.readouterr()
    assert main(["prune", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# ---- several roots ---------------------------------------------------------------------------------------------------


def test_a_pattern_that_the_shell_left_alone(tmp_path, capsys):
    roots = [make(tmp_path / "runs" / name / "checkpoints", 100, 200, 300) for name in ("a", "b")]
    assert main(["prune", f"{tmp_path}/runs/*/checkpoints", "--keep-last", "1"]) == 0
    assert [kept(root) for root in roots] == [[300], [300]]
    told = capsys.readouterr().out
    assert f"{roots[0]}:" in told
    assert "2 roots: " in told.splitlines()[-1]
    assert "freed" in told.splitlines()[-1]


def test_the_shape_of_the_json_depends_on_how_it_was_asked_for(tmp_path, capsys):
    root = make(tmp_path / "runs" / "a", 100, 200)
    assert said(capsys, str(root), "--keep-last", "1", "--dry-run")["root"] == str(root)
    (one,) = said(capsys, f"{tmp_path}/runs/*", "--keep-last", "1", "--dry-run")
    assert one["root"] == str(root)
    other = make(tmp_path / "runs" / "b", 100)
    assert [each["root"] for each in said(capsys, str(root), str(other), "--keep-last", "1")] == [str(root), str(other)]


def test_a_root_that_is_named_twice_is_pruned_once(tmp_path, capsys):
    root = make(tmp_path / "root", 100, 200)
    (tmp_path / "link").symlink_to(root)
    assert len(said(capsys, str(root), f"{tmp_path}/*", "--keep-last", "1")) == 1


def test_one_that_cannot_be_pruned_keeps_the_others_from_nothing(tmp_path, monkeypatch, capsys):
    roots = [make(tmp_path / name, 100, 200) for name in ("a", "b", "c")]
    listdir = os.listdir

    def refuse(path):
        if Path(path) == roots[1]:
            raise PermissionError(13, "Permission denied", str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refuse)
    assert main(["prune", *map(str, roots), "--keep-last", "1"]) == 10
    captured = capsys.readouterr()
    assert f"Error: the checkpoint root {roots[1]} cannot be read (Permission denied)" in captured.err
    assert "1 could not be pruned, see above" in captured.out
    assert main(["prune", *map(str, roots), "--keep-last", "1", "--json"]) == 10
    first, second, third = json.loads(capsys.readouterr().out)
    assert (second["exit_code"], second["root"]) == (10, str(roots[1]))
    assert first["checkpoints"][0]["step"] == third["checkpoints"][0]["step"] == 200
    monkeypatch.undo()
    assert [kept(root) for root in roots] == [[200], [100, 200], [200]]


def test_a_root_without_permission(tmp_path):
    roots = [make(tmp_path / name, 100, 200) for name in ("a", "b", "c")]
    roots[1].chmod(0)
    try:
        ended = unprivileged.ckptman("prune", *roots, "--keep-last", "1", "--json")
    finally:
        roots[1].chmod(0o755)
    assert ended.returncode == 10
    told = json.loads(ended.stdout)
    assert [each.get("exit_code") for each in told] == [None, 10, None]
    assert "Permission denied" in told[1]["error"]
    assert [kept(root) for root in roots] == [[200], [100, 200], [200]]


def test_a_checkpoint_that_may_not_be_removed_stays_and_what_was_freed_is_told(tmp_path):
    roots = [make(tmp_path / name, 100, 200, 300) for name in ("a", "b")]
    stuck = roots[0] / step_folder(100)
    before = {path.name: path.read_bytes() for path in stuck.iterdir()}
    stuck.chmod(0o555)  # as those of somebody else are in a root that all may write
    try:
        ended = unprivileged.ckptman("prune", *roots, "--keep-last", "1")
        assert ended.returncode == 10
        assert f"{stuck} cannot be removed (Permission denied): check permissions and prune again" in ended.stderr
        size = Catalog(roots[0]).entry(300).require_manifest().total_bytes
        assert f"Deleted 1 of 3 checkpoints: {console.size(size)} freed." in ended.stdout
        assert f"2 roots: {console.size(3 * size)} freed; 1 could not be pruned, see above." in ended.stdout
        assert kept(roots[0]) == [100, 300]
        ended = unprivileged.ckptman("prune", roots[0], "--keep-last", "1", "--json")
        told = json.loads(ended.stdout)
        assert (ended.returncode, told["exit_code"], told["freed_bytes"]) == (10, 10, 0)
        assert f"{stuck} cannot be removed" in told["error"]
        assert "Nothing was deleted." in unprivileged.ckptman("prune", roots[0], "--keep-last", "1").stdout
    finally:
        stuck.chmod(0o755)
    assert {path.name: path.read_bytes() for path in stuck.iterdir()} == before
    assert main(["prune", str(roots[0]), "--keep-last", "1"]) == 0
    assert [kept(root) for root in roots] == [[300], [300]]


def test_folders_with_the_names_of_files_stop_no_prune(tmp_path):
    root = make(tmp_path / "root", 100, 200)
    strange = [run_folder(root) / name for name in ("lease-00000003.json", "outcome.json.tmp-1-0123abcd")]
    for path in strange:
        path.mkdir(parents=True)
    for _ in range(2):
        assert main(["prune", str(root), "--keep-last", "1"]) == 0
    assert kept(root) == [200]
    assert all(path.is_dir() for path in strange)


def test_a_pattern_that_matches_nothing(tmp_path, capsys):
    (tmp_path / "a-file").touch()
    assert main(["prune", f"{tmp_path}/a-*", "--keep-last", "1"]) == 3
    assert "no folder matches" in capsys.readouterr().err


def test_an_empty_root_is_not_the_folder_we_are_in(tmp_path, monkeypatch, capsys):
    root = make(tmp_path / "root", 100, 200)
    monkeypatch.chdir(root)
    assert main(["prune", "", "--keep-last", "1"]) == 2
    assert "is a variable not set?" in capsys.readouterr().err
    assert kept(root) == [100, 200]
    assert main(["prune", ".", "--keep-last", "1"]) == 0
    assert kept(root) == [200]


def test_a_folder_with_a_bracket_in_its_name(tmp_path):
    root = make(tmp_path / "run[1]", 100, 200)
    make(tmp_path / "run1", 100, 200)
    assert main(["prune", str(root), "--keep-last", "1"]) == 0
    assert kept(root) == [200]
    assert kept(tmp_path / "run1") == [100, 200]


# ---- the rules of the run --------------------------------------------------------------------------------------------


def test_without_options_the_rules_of_the_run_count(tmp_path, capsys):
    first, second = make(tmp_path / "a", 100, 200, 300), make(tmp_path / "b", 100, 200, 300)
    for root, policy in ((first, KeepLast(2)), (second, KeepBest("loss", mode="max") | KeepLast(1))):
        run_folder(root).mkdir()
        write_policy(root, policy)
    assert main(["prune", str(first), str(second)]) == 0
    assert (kept(first), kept(second)) == ([200, 300], [100, 300])
    assert main(["prune", str(second), "--keep-last", "1"]) == 0, "options go before what is stored"
    assert kept(second) == [300]


def test_a_run_that_keeps_everything_and_a_limit_in_percent(tmp_path, capsys, monkeypatch):
    from ckptman.doctor import quota

    root = make(tmp_path / "root", 100, 200, 300)
    run_folder(root).mkdir()
    write_policy(root, None)
    assert main(["prune", str(root)]) == 0
    assert kept(root) == [100, 200, 300]
    write_policy(root, AtMost(percent=50))
    size = Catalog(root).entry(100).require_manifest().total_bytes
    monkeypatch.setattr(quota, "capacity_bytes", lambda root: size * 4)
    assert main(["prune", str(root)]) == 0
    assert kept(root) == [200, 300]


def test_no_rules_at_all_are_refused(tmp_path, capsys):
    root = make(tmp_path / "root", 100, 200)
    assert main(["prune", str(root)]) == 2
    assert "so there are no rules: say what to keep, with options such as --keep-last 3" in capsys.readouterr().err
    assert kept(root) == [100, 200]


def test_a_slip_in_the_rules_of_the_run_deletes_nothing(tmp_path, capsys):
    root = make(tmp_path / "root", 100, 200, 300)
    run_folder(root).mkdir()
    write_policy(root, KeepLast(1) | KeepBest("lozz", 3))
    for options in ([], ["--dry-run"]):
        assert main(["prune", str(root), *options]) == 2
        assert "by the rules that the run stored, no checkpoint has the metric 'lozz'" in capsys.readouterr().err
    assert kept(root) == [100, 200, 300]
    assert main(["prune", str(root), "--leftovers"]) == 0
    write_policy(root, KeepSteps(7, 9000))
    assert main(["prune", str(root)]) == 0, "step 9000 may come"
    assert kept(root) == [300]


class Own(RetentionPolicy):
    def keeps(self, records):
        return {}


@pytest.mark.parametrize("stored", ["own", "rubbish", "newer", "link", "empty"])
def test_rules_that_cannot_be_used_are_refused(tmp_path, stored, capsys):
    root = make(tmp_path / "root", 100, 200)
    run_folder(root).mkdir()
    path = retention_path(root)
    if stored == "own":
        write_policy(root, KeepLast(1) | Own())
    elif stored == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        text = {"rubbish": "{", "newer": '{"format_version": 2}', "empty": '{"format_version": 1, "rules": []}'}
        path.write_text(text[stored])
    assert main(["prune", str(root)]) in (2, 9)
    told = capsys.readouterr().err
    assert "say what to keep" in told or "upgrade ckptman" in told
    assert kept(root) == [100, 200]


def test_what_is_stored_is_written_where_it_changed(tmp_path):
    run_folder(tmp_path).mkdir()
    write_policy(tmp_path, KeepLast(3))
    before = retention_path(tmp_path).stat()
    write_policy(tmp_path, KeepLast(3))
    assert retention_path(tmp_path).stat().st_ino == before.st_ino
    write_policy(tmp_path, KeepLast(4))
    assert read_policy(tmp_path) == KeepLast(4)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--keep-last", "0"], "0 never means all"),
        (["--keep-within", "0s"], "a time above 0"),
        (["--keep-within", "soon"], "--keep-within: a time"),
        (["--keep-within", "7"], "7 has no unit: say it in min, h, d or w"),
        (["--keep-within", "6M"], "6M may be minutes or months"),
        (["--keep-within", "1d 12m"], "1d 12m may be minutes or months"),
        (["--keep-steps", "1,x"], "--keep-steps: steps with commas"),
        (["--keep-steps", ""], "--keep-steps: steps with commas"),
        (["--max-bytes", "70"], "has no unit"),
        (["--max-percent", "101"], "percent must be at most 100"),
        (["--keep-best", "loss", "--keep-best", "loss:2:max"], "both the lowest and the highest"),
        (["--keep-best", "los"], "has the metric 'los'; they have loss"),
        (["--keep-best", "nan"], "the metric 'nan' is a finite number in no checkpoint"),
        (
            ["--keep-steps", "15,99999"],
            "keep none of 2 checkpoints (KeepSteps(15, 99999)). Nothing is deleted",
        ),
        (["--keep-every", "1000000"], "keep none of 2 checkpoints (KeepEvery(steps=1000000))"),
        (["--keep-every", "1000", "--keep-steps", "7"], "(KeepEvery(steps=1000) | KeepSteps(7))"),
        (["--leftovers", "--keep-last", "3"], "rules for them contradict it"),
        (["--keep-last", "1", "--jobs", "0"], "--jobs must be"),
        (["--keep-last", "1", "--jobs", "10000"], "--jobs: at most"),
        (["--keep-last", "1", "--files-per-second", "0"], "--files-per-second must be"),
    ],
)
def test_options_that_cannot_be_meant(tmp_path, options, text, capsys):
    root = make(tmp_path / "root", 100, 200)
    assert main(["prune", str(root), *options]) == 2
    assert text in capsys.readouterr().err
    assert kept(root) == [100, 200]


def test_a_folder_that_is_no_root_is_refused(tmp_path, capsys):
    for name in ("step-7", "step-00000001000", "STEP-0000000100", "step-0000000100.bak", "epoch-3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.pt").touch()
    before = sorted(tmp_path.rglob("*"))
    for option in (["--keep-last", "1"], ["--leftovers"]):
        assert main(["prune", str(tmp_path), *option]) == 2
        assert "is not a root of checkpoints" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
    assert main(["prune", str(tmp_path / "nowhere"), "--keep-last", "1"]) == 3
    (tmp_path / "file").touch()
    assert main(["prune", str(tmp_path / "file"), "--keep-last", "1"]) == 10


def test_one_checkpoint_is_no_root(tmp_path, capsys):
    root = make(tmp_path / "root", 100)
    assert main(["prune", str(root / step_folder(100)), "--keep-last", "1"]) == 2
    assert "is one checkpoint, not a root" in capsys.readouterr().err
    assert kept(root) == [100]


def test_what_plain_dcp_wrote_makes_a_root_and_is_left_alone(tmp_path, capsys):
    (tmp_path / "step-100").mkdir()
    (tmp_path / "step-100" / ".metadata").touch()
    assert main(["prune", str(tmp_path), "--keep-last", "1"]) == 0
    assert "Nothing to delete" in capsys.readouterr().out
    assert (tmp_path / "step-100" / ".metadata").exists()


def test_names_that_only_look_like_steps_and_links_are_left_alone(tmp_path):
    precious = make(tmp_path / "precious", 1, 2, 3)
    root = make(tmp_path / "root", 100, 200)
    for name in ("step-0000000050.tmp", "step-50", "step-0000000300.tmp-", "step-0000000100.backup-1"):
        (root / name).mkdir()
    (root / step_folder(50)).symlink_to(precious / step_folder(1))
    (root / "checkpoints").symlink_to(precious)
    (root / f"{step_folder(60)}.tmp-deadbeef").symlink_to(precious)
    assert main(["prune", str(root), "--keep-last", "1"]) == 0
    assert kept(precious) == [1, 2, 3]
    assert all(each.complete for each in Catalog(precious).scan())
    left = {path.name for path in root.iterdir()}
    assert left == {
        *("step-0000000050.tmp", "step-50", "step-0000000300.tmp-", "step-0000000100.backup-1"),
        *("checkpoints", step_folder(50), step_folder(200)),
    }


def test_copies_that_people_made_are_no_leftovers(tmp_path, capsys):
    root = make(tmp_path / "root", 30, 40)
    own = [f"{step_folder(30)}.{tag}" for tag in ("old-best", "old-1", "tmp-mine", "trash-1", "old-20261122")]
    own += [f"{step_folder(40)}.tmp-rsync", f"{step_folder(30)}.abandoned-mine"]
    for name in own:
        shutil.copytree(root / step_folder(30), root / name)
    shutil.copytree(root / step_folder(30), root / f"{step_folder(30)}.old-1a2b3c4d-7")
    assert main(["prune", str(root), "--leftovers"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert sorted(line.split()[1] for line in told if line.startswith("ignore")) == sorted(own)
    assert all(line.endswith("it does not count: its name is none that ckptman gives") for line in told[2:9])
    assert said(capsys, str(root), "--keep-last", "1")["ignored"][0] == {
        "step": 30,
        "path": str(root / f"{step_folder(30)}.abandoned-mine"),
        "why": "its name is none that ckptman gives",
    }
    assert {path.name for path in root.iterdir()} == {step_folder(40), *own}


def test_a_clock_in_the_future_removes_nothing_that_is_young(tmp_path, capsys):
    now = time.time()
    for step, when in ((100, now - 3 * 86_400), (200, now), (300, now + 400 * 86_400)):
        commit(tmp_path, step, time_seconds=when)
    assert main(["prune", str(tmp_path), "--keep-within", "2d"]) == 0
    assert kept(tmp_path) == [200, 300]
    assert "its time is in the future, and counts as now" in capsys.readouterr().out


def test_a_limit_that_cannot_be_kept_says_by_how_much(tmp_path, capsys):
    root = make(tmp_path / "root", 100, 200)
    assert main(["pin", str(root), "--step", "100", "--why", "the paper"]) == 0
    assert main(["prune", str(root), "--max-bytes", "100B"]) == 0
    assert kept(root) == [100, 200]
    assert "over the limit: what is left is the newest, verified, pinned or in use" in capsys.readouterr().out
    assert said(capsys, str(root), "--max-bytes", "100B")["over_bytes"] > 0


# ---- readers and leftovers -------------------------------------------------------------------------------------------


def test_what_is_being_read_stays(tmp_path, capsys):
    root = make(tmp_path / "root", 100, 200, 300)
    with lease(root, [step_folder(100)], what="verify"):
        assert main(["prune", str(root), "--keep-last", "1"]) == 0
        assert kept(root) == [100, 300]
        assert f"in use by verify (pid {os.getpid()} on host" in capsys.readouterr().out
    assert main(["prune", str(root), "--keep-last", "1"]) == 0
    assert kept(root) == [300]


def test_a_copy_that_is_being_written_is_no_leftover(tmp_path):
    root = make(tmp_path / "root", 100)
    draft = root / f"{step_folder(200)}.tmp-copy-{'0123abcd' * 2}"
    draft.mkdir()
    with lease(root, [draft.name], what="copy"):
        assert main(["prune", str(root), "--leftovers"]) == 0
        assert draft.exists()
    assert main(["prune", str(root), "--leftovers"]) == 0
    assert not draft.exists()


def test_leftovers_go_only_when_their_owner_is_provably_gone(tmp_path):
    root = make(tmp_path / "root", 100)
    run_folder(root).mkdir(exist_ok=True)
    me = this_process("run", None)

    def leave(owner):
        owner_path(root, 1).write_text(owner.model_dump_json() + "\n")
        draft = root / f"{step_folder(200)}.tmp-{owner.nonce}-1"
        draft.mkdir(exist_ok=True)
        return draft

    alive = leave(me)
    assert main(["prune", str(root), "--leftovers"]) == 0
    assert alive.exists()
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as child:
        pass
    dead = leave(me.model_copy(update={"pid": child.pid}))
    assert main(["prune", str(root), "--leftovers"]) == 0
    assert not dead.exists()


@pytest.mark.parametrize("options", [["--jobs", "3"], ["--files-per-second", "1000"], ["--jobs", "2"]])
def test_deleting_in_parallel_and_slowly(tmp_path, options, capsys):
    root = make(tmp_path / "root", *range(10, 110, 10))
    told = said(capsys, str(root), "--keep-last", "2", *options)
    assert kept(root) == [90, 100]
    assert told["freed_bytes"] == sum(each["bytes"] for each in told["checkpoints"] if not each["keep"])
    assert {path.name for path in root.iterdir()} == {step_folder(90), step_folder(100)}


# ---- pins ------------------------------------------------------------------------------------------------------------


def test_a_pin_keeps_until_it_is_taken_off(tmp_path, capsys):
    root = make(tmp_path / "root", 100, 200, 300)
    path = root / step_folder(100)
    assert main(["pin", str(path), "--why", "Table 2"]) == 0
    assert main(["prune", str(root), "--keep-last", "1"]) == 0
    assert kept(root) == [100, 300]
    assert "pinned: Table 2" in capsys.readouterr().out
    assert main(["list", str(root)]) == 0
    assert "complete, pinned: Table 2" in capsys.readouterr().out
    assert main(["verify", str(path)]) == 0
    assert PINNED not in capsys.readouterr().out, "no remark on a file that is meant to be there"
    note = read_pin(path)
    assert note is not None
    assert "@" in note.by
    assert abs(note.time_seconds - time.time()) < 600
    shutil.copytree(path, tmp_path / "copy" / path.name)
    assert read_pin(tmp_path / "copy" / path.name) == note
    assert main(["unpin", str(path)]) == 0
    assert "no longer pinned" in capsys.readouterr().out
    assert main(["unpin", str(path)]) == 0
    assert "was not pinned" in capsys.readouterr().out
    (path / VERIFIED).unlink()  # that the verify left: the newest verified one stays
    assert main(["prune", str(root), "--keep-last", "1"]) == 0
    assert kept(root) == [300]


def test_pins_of_a_root_by_step(tmp_path, capsys):
    root = make(tmp_path / "root", 100, 200)
    assert main(["pin", str(root), "--why", "first"]) == 0
    assert main(["pin", str(root), "--step", "100", "--why", "second"]) == 0
    assert main(["pin", str(root), "--step", "100", "--why", "third"]) == 0
    notes = [read_pin(root / step_folder(step)) for step in (100, 200)]
    assert [note and note.why for note in notes] == ["third", "first"]
    assert main(["pin", str(root), "--step", "150", "--why", "x"]) == 3
    assert main(["pin", str(root), "--why", "  "]) == 2
    assert "a pin needs a reason" in capsys.readouterr().err
    assert main(["pin", str(root), "--why", "x" * 1001]) == 2
    assert main(["pin", str(tmp_path / "nowhere"), "--why", "x"]) == 3


def test_what_is_known_to_be_damaged_is_not_pinned(tmp_path, capsys):
    root = make(tmp_path / "root", 100, 200)
    file = next((root / step_folder(200)).glob("*.distcp"))
    file.write_bytes(b"\xff" + file.read_bytes()[1:])
    assert main(["verify", str(root)]) == 4
    assert main(["pin", str(root), "--why", "the paper"]) == 4
    assert "pin another step" in capsys.readouterr().err
    assert read_pin(file.parent) is None


@pytest.mark.parametrize("rubbish", [b"", b"{}", b"\xff", b'{"why": ""}', b"[" * 100_000])
def test_a_pin_that_cannot_be_read_pins(tmp_path, rubbish, capsys):
    root = make(tmp_path / "root", 100, 200)
    (root / step_folder(100) / PINNED).write_bytes(rubbish)
    assert main(["prune", str(root), "--keep-last", "1"]) == 0
    assert kept(root) == [100, 200]
    assert "cannot be read" in capsys.readouterr().out


def test_what_a_pin_says_cannot_command_a_terminal(tmp_path, capsys):
    root = make(tmp_path / "root", 100, 200)
    assert main(["pin", str(root), "--step", "100", "--why", "\x1b[2J"]) == 0
    assert main(["prune", str(root), "--keep-last", "1"]) == 0
    assert main(["list", str(root)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_a_reason_that_is_no_text(tmp_path, capsys):
    root = make(tmp_path / "root", 100, 200)
    odd = os.fsdecode(b"why \xff\xfe")
    assert main(["pin", str(root), "--step", "100", "--why", odd]) == 0
    note = read_pin(root / step_folder(100))
    assert note is not None
    assert note.why == "why \\udcff\\udcfe"
    assert main(["rollback", str(root), "--to-step", "100", "--why", odd]) == 0
    assert main(["list", str(root)]) == 0
    assert main(["rollback", str(root), "--undo"]) == 0
    capsys.readouterr()


def test_a_pinned_step_that_is_saved_again_is_still_there(tmp_path):
    root = make(tmp_path / "root", 100, 200)
    assert main(["pin", str(root), "--step", "100", "--why", "the paper"]) == 0
    commit(root, 100)
    assert main(["prune", str(root), "--keep-last", "1"]) == 0
    (aside,) = (path for path in root.iterdir() if ".old-" in path.name)
    assert read_pin(aside) is not None

"""`ckptman prune`: options and rules of the run, output, several roots, and what it refuses to touch; `ckptman pin`."""

import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptman.cli import console
from ckptman.cli.app import main
from ckptman.policies.retention_rules import AtMost, KeepBest, KeepLast, KeepSteps, RetentionPolicy
from ckptman.storage.catalog import prune as prune_module
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.catalog.pins import PINNED, read_pin
from ckptman.storage.catalog.prune import read_policy, write_policy
from ckptman.storage.catalog.reader_lease import lease
from ckptman.storage.catalog.verified import VERIFIED
from ckptman.storage.format.paths import retention_path, run_folder, step_folder
from tests.helpers import unprivileged
from tests.helpers.checkpoints import commit, flip_byte, steps_of


def make(root, *steps):
    """A root with a run's own folder. The loss falls from step to step; the metric `nan` is never finite."""
    for step in steps:
        commit(root, step, metrics={"loss": 1000 / step, "nan": float("nan")}, time_seconds=time.time())
    run_folder(root).mkdir(parents=True)
    return root


@pytest.fixture
def root(tmp_path):
    return make(tmp_path / "root", 100, 200, 300)


@pytest.fixture
def roots(tmp_path):
    return [make(tmp_path / "runs" / name, 100, 200, 300) for name in ("a", "b", "c")]


@pytest.fixture
def prune(capsys):
    """Run the command; return its exit code, output and errors."""

    def run(*arguments):
        capsys.readouterr()
        return main(["prune", *map(str, arguments)]), *capsys.readouterr()

    return run


@pytest.fixture
def pruned(prune):
    """Run the command with --json, and return what it says."""

    def run(*arguments, code=0):
        ended, out, _ = prune(*arguments, "--json")
        assert ended == code
        return json.loads(out)

    return run


def kept(root):
    return steps_of(Catalog(root).scan())


def names_in(root):
    return {path.name for path in root.iterdir()} - {".ckptman"}


def ckptman(*arguments):
    assert main(list(map(str, arguments))) == 0


# ---- options and output ----------------------------------------------------------------------------------------------


@pytest.fixture
def messy(tmp_path):
    """Steps 100 to 500; the loss is lowest at 200, the accuracy highest at 300; and what two crashes left."""
    for step, loss, accuracy in ((100, 3.0, 0.1), (200, 1.0, 0.2), (300, 2.0, 0.9), (400, 4.0, 0.3), (500, 5.0, 0.4)):
        commit(tmp_path, step, time_seconds=time.time(), metrics={"loss": loss, "accuracy": accuracy})
    for name in ("step-0000000600.tmp-deadbeef-1", "step-0000000050.trash-deadbeef-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_bytes(b"x" * 1024)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ("--keep-best loss:2:min", [200, 300, 500]),
        ("--keep-best accuracy:1:max --keep-best loss", [200, 300, 500]),
        ("--keep-last 1 --keep-every 300 --keep-best accuracy:max", [300, 500]),
        ("--leftovers", [100, 200, 300, 400, 500]),
        ("--keep-steps 100,300,999", [100, 300, 500]),
        ("--keep-within 1d", [100, 200, 300, 400, 500]),
        ("--keep-daily 3", [500]),
        ("--max-percent 100", [100, 200, 300, 400, 500]),
        ("--max-bytes 1B", [500]),
        ("--keep-last 3 --max-bytes 1300B --jobs 1", [400, 500]),
        ("--keep-last 1 --jobs 3 --files-per-second 1000", [500]),
    ],
)
def test_what_a_rule_keeps_stays_and_the_rest_goes(options, steps, messy, pruned):
    told = pruned(messy, *options.split())
    assert kept(messy) == steps == [each["step"] for each in told["checkpoints"] if each["keep"]]
    assert names_in(messy) == {step_folder(step) for step in steps}
    assert told["freed_bytes"] == sum(each["bytes"] for each in told["checkpoints"] if not each["keep"]) + 2048


def test_a_dry_run_is_the_same_plan_and_touches_nothing(messy, pruned):
    before = sorted(messy.rglob("*"))
    dry = pruned(messy, "--keep-last", "2", "--dry-run")
    assert sorted(messy.rglob("*")) == before
    real = pruned(messy, "--keep-last", "2")
    assert [each["path"] for each in real["leftovers"]] == [str(each) for each in before if ".t" in each.name]
    assert (dry.pop("dry_run"), real.pop("dry_run")) == (True, False)
    assert dry == real


def test_what_is_read_or_over_the_limit_stays_and_that_is_said(root, prune, pruned):
    with lease(root, [step_folder(100)], what="verify"):
        _, out, _ = prune(root, "--keep-last", "1")
        assert f"in use by verify (pid {os.getpid()} on host" in out
    assert kept(root) == [100, 300]
    assert "over the limit: what is left is the newest" in prune(root, "--max-bytes", "100B")[1]
    assert pruned(root, "--max-bytes", "100B")["over_bytes"] > 0


def test_a_second_prune_of_this_host_waits(root, prune, monkeypatch):
    monkeypatch.setattr(prune_module, "LOCK_SECONDS", 0.1)
    with prune_module.one_at_a_time(root):
        code, _, err = prune(root, "--keep-last", "1")
        assert code == 1
        assert "another ckptman prune has been at work" in err
        assert kept(root) == [100, 200, 300]
    assert prune(root, "--keep-last", "1")[0] == 0
    assert kept(root) == [300]


# ---- the rules of the run --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "options", "steps"),
    [
        (KeepLast(2), [], [200, 300]),
        (KeepBest("loss", mode="max") | KeepLast(1), [], [100, 300]),
        (KeepBest("loss", mode="max"), ["--keep-last", "2"], [200, 300]),  # options go before what is stored
        (None, [], [100, 200, 300]),
        (AtMost(percent=50), [], [200, 300]),  # of a disk for four
        (KeepSteps(7, 9000), [], [300]),  # step 9000 may come
        (KeepLast(1) | KeepBest("lozz", 3), ["--leftovers"], [100, 200, 300]),
    ],
)
def test_without_options_the_rules_of_the_run_count(policy, options, steps, root, prune, monkeypatch):
    from ckptman.storage.io import mount

    size = Catalog(root).entry(100).require_manifest().total_bytes
    monkeypatch.setattr(mount, "capacity_bytes", lambda root, run: size * 4)
    write_policy(root, policy)
    assert prune(root, *options)[0] == 0
    assert kept(root) == steps


@dataclass(frozen=True)
class Own(RetentionPolicy):
    def keeps(self, records):
        return {}


@pytest.mark.parametrize(
    ("stored", "code", "text"),
    [
        (KeepLast(1) | KeepBest("lozz", 3), 2, "by the rules that the run stored, no checkpoint has the metric 'lozz'"),
        (KeepLast(1) | Own(), 2, "say what to keep"),
        ("{", 9, "say what to keep"),
        ('{"format_version": 2}', 9, "upgrade ckptman"),
        ('{"format_version": 1, "rules": []}', 9, "say what to keep"),
        (Path("elsewhere"), 9, "say what to keep"),
    ],
    ids=str,
)
def test_rules_that_cannot_be_used_are_refused(stored, code, text, root, prune):
    if isinstance(stored, RetentionPolicy):
        write_policy(root, stored)
    elif isinstance(stored, Path):
        retention_path(root).symlink_to(stored)
    else:
        retention_path(root).write_text(stored)
    for options in ([], ["--dry-run"]):
        ended, _, err = prune(root, *options)
        assert ended in (2, code)
        assert text in err
    assert kept(root) == [100, 200, 300]


def test_what_is_stored_is_written_where_it_changed(root):
    write_policy(root, KeepLast(3))
    before = retention_path(root).stat()
    write_policy(root, KeepLast(3))
    assert retention_path(root).stat().st_ino == before.st_ino
    write_policy(root, KeepLast(4))
    assert read_policy(root) == KeepLast(4)


# ---- several roots ---------------------------------------------------------------------------------------------------


def test_what_cannot_be_pruned_keeps_nothing_else_from_it(roots):
    """A root that may not be read, and a checkpoint of somebody else in a root that all may write."""
    size = Catalog(roots[0]).entry(300).require_manifest().total_bytes
    stuck = roots[0] / step_folder(100)
    before = {path.name: path.read_bytes() for path in stuck.iterdir()}
    stuck.chmod(0o555)
    roots[1].chmod(0)
    try:
        unprivileged.need_refusal(stuck)
        ended = unprivileged.ckptman("prune", *roots, "--keep-last", "1")
        again = unprivileged.ckptman("prune", *roots, "--keep-last", "1", "--json")
    finally:
        stuck.chmod(0o755)
        roots[1].chmod(0o755)
    assert ended.returncode == again.returncode == 10
    told = f"{stuck} cannot be removed (Permission denied): check permissions and prune again"
    assert told in ended.stderr
    assert f"Error: the checkpoint root {roots[1]} cannot be read (Permission denied)" in ended.stderr
    assert f"Deleted 1 of 3 checkpoints: {console.size(size)} freed." in ended.stdout
    assert f"3 roots: {console.size(3 * size)} freed; 2 could not be pruned, see above." in ended.stdout
    first, second, third = json.loads(again.stdout)
    assert told in first["error"]
    assert (first["exit_code"], first["freed_bytes"], third["freed_bytes"]) == (10, 0, 0)
    assert (second["exit_code"], second["root"]) == (10, str(roots[1]))
    assert "Permission denied" in second["error"]
    assert [kept(root) for root in roots] == [[100, 300], [100, 200, 300], [300]]
    assert {path.name: path.read_bytes() for path in stuck.iterdir()} == before


def test_names_of_roots_and_the_shape_of_the_json(root, tmp_path, prune, pruned, monkeypatch):
    brackets = make(tmp_path / "run[1]", 100, 200)
    make(tmp_path / "run1", 100, 200)
    assert prune(brackets, "--keep-last", "1")[0] == 0
    assert (kept(brackets), kept(tmp_path / "run1")) == ([200], [100, 200])
    assert prune(make(tmp_path / "empty"), "--keep-best", "loss")[0] == 0
    assert [each["root"] for each in pruned(f"{tmp_path}/ro*", "--keep-last", "2")] == [str(root)]
    (tmp_path / "link").symlink_to(root)
    assert len(pruned(root, f"{tmp_path}/l*", "--keep-last", "2")) == 1, "named twice, and pruned once"
    monkeypatch.chdir(root)
    assert pruned(".", "--keep-last", "1")["freed_bytes"] > 0
    assert kept(root) == [300]


# ---- what is left alone ----------------------------------------------------------------------------------------------


def test_what_plain_dcp_wrote_makes_a_root_and_is_left_alone(tmp_path, prune):
    (tmp_path / "step-100").mkdir()
    (tmp_path / "step-100" / ".metadata").touch()
    code, out, _ = prune(tmp_path, "--keep-last", "1")
    assert code == 0
    assert "Nothing to delete" in out
    assert (tmp_path / "step-100" / ".metadata").exists()


def test_names_that_only_look_like_ours_and_links_are_left_alone(root, tmp_path, prune):
    precious = make(tmp_path / "precious", 1, 2, 3)
    left = {"step-0000000050.tmp", "step-50", "step-0000000300.tmp-", "step-0000000100.backup-1"}
    files = {run_folder(root) / name for name in ("lease-00000003.json", "outcome.json.tmp-1-0123abcd")}
    for path in {root / name for name in left} | files:
        path.mkdir()
    (root / step_folder(50)).symlink_to(precious / step_folder(1))
    (root / "checkpoints").symlink_to(precious)
    (root / f"{step_folder(60)}.tmp-deadbeef").symlink_to(precious)
    assert prune(root, "--keep-last", "1")[0] == 0
    assert names_in(root) == {*left, "checkpoints", step_folder(50), step_folder(300)}
    assert all(path.is_dir() for path in files), "folders with the names of files"
    assert [(each.step, each.complete) for each in Catalog(precious).scan()] == [(1, True), (2, True), (3, True)]


def test_copies_that_people_made_are_no_leftovers(root, pruned):
    tags = ("abandoned-mine", "old-20261122", "old-best", "tmp-rsync", "trash-1")
    own = [f"{step_folder(200)}.{tag}" for tag in tags]
    for name in [*own, f"{step_folder(200)}.old-1a2b3c4d-7"]:
        shutil.copytree(root / step_folder(200), root / name)
    ignored = sorted(pruned(root, "--keep-last", "1")["ignored"], key=lambda each: each["path"])
    why = "its name is none that ckptman gives"
    assert ignored == [{"step": 200, "path": str(root / name), "why": why} for name in own]
    assert names_in(root) == {step_folder(300), *own}


@pytest.mark.parametrize("kind", ["tmp", "trash"])
@pytest.mark.parametrize(
    ("content", "other"),
    [
        ({"thesis.tex": b"x"}, "thesis.tex"),
        ({"__0_0.distcp": b"x", "notes.txt": b"x"}, "notes.txt"),
        ({"index.json": b"x", "a/b": b"x"}, "a"),
    ],
)
def test_a_name_of_ours_makes_nothing_a_leftover(root, pruned, kind, content, other):
    path = root / f"{step_folder(200)}.{kind}-1a2b3c4d-7"
    for name, data in content.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    found = pruned(root, "--keep-last", "1")
    assert {name: (path / name).read_bytes() for name in content} == content
    [ignored] = found["ignored"]
    assert ignored["why"] == f"{other} in it is nothing that ckptman wrote: move it away"
    for name in ("thesis.tex", "notes.txt", "a/b"):
        (path / name).unlink(missing_ok=True)
    shutil.rmtree(path / "a", ignore_errors=True)
    assert pruned(root, "--keep-last", "1")["ignored"] == []
    assert names_in(root) == {step_folder(300)}


def test_what_was_put_beside_a_checkpoint_outlives_a_save_over_it(root):
    (root / step_folder(200) / "eval.json").write_text("{}")
    commit(root, 200)
    [aside] = [each for each in root.iterdir() if ".old-" in each.name]
    assert (aside / "eval.json").read_text() == "{}"
    assert not (root / step_folder(200) / "eval.json").exists()


# ---- pins ------------------------------------------------------------------------------------------------------------


def test_a_pin_keeps_until_it_is_taken_off(root, tmp_path, capsys):
    path = root / step_folder(100)
    ckptman("pin", path, "--why", "Table 2")
    ckptman("prune", root, "--keep-last", "1")
    assert kept(root) == [100, 300]
    assert "pinned: Table 2" in capsys.readouterr().out
    ckptman("list", root)
    assert "complete, pinned: Table 2" in capsys.readouterr().out
    ckptman("verify", path)
    assert PINNED not in capsys.readouterr().out, "no remark on a file that is meant to be there"
    note = read_pin(path)
    assert "@" in note.by
    assert abs(note.time_seconds - time.time()) < 600
    shutil.copytree(path, tmp_path / "copy" / path.name)
    assert read_pin(tmp_path / "copy" / path.name) == note
    for said in ("no longer pinned", "was not pinned"):
        ckptman("unpin", path)
        assert said in capsys.readouterr().out
    (path / VERIFIED).unlink()  # that the verify left: the newest verified one stays
    ckptman("prune", root, "--keep-last", "1")
    assert kept(root) == [300]


def test_pins_of_a_root_by_step(root, tmp_path, capsys):
    for options in ([], ["--step", "100"]):
        ckptman("pin", root, *options, "--why", "first")
    ckptman("pin", root, "--step", "100", "--why", "why \udcff \x1b[2J")
    assert read_pin(root / step_folder(300)).why == "first"
    assert read_pin(root / step_folder(100)).why == r"why \udcff \x1b[2J"
    for command in (["prune", root, "--keep-last", "1"], ["list", root]):
        ckptman(*command)
        assert "\x1b" not in capsys.readouterr().out, "it cannot command a terminal"
    commit(root, 100)
    ckptman("prune", root, "--keep-last", "1")
    (aside,) = root.glob("*.old-*")
    assert read_pin(aside) is not None, "a pinned step that was saved again is still there"


def test_what_is_known_to_be_damaged_is_not_pinned(root, capsys):
    flip_byte(root / step_folder(200) / "__0_0.distcp")
    assert main(["verify", str(root), "--step", "200"]) == 4
    assert main(["pin", str(root), "--step", "200", "--why", "x"]) == 4
    assert "pin another step" in capsys.readouterr().err
    assert not list(root.glob(f"*/{PINNED}"))


@pytest.mark.parametrize("rubbish", [b"", b"{}", b"\xff", b'{"why": ""}', b"[" * 100_000])
def test_a_pin_that_cannot_be_read_pins(root, rubbish, prune):
    (root / step_folder(100) / PINNED).write_bytes(rubbish)
    assert "cannot be read" in prune(root, "--keep-last", "1")[1]
    assert kept(root) == [100, 300]

import json

from ckptman.storage.catalog.verified import remember_damage
from ckptman.storage.format.manifest import Mesh
from tests.helpers.checkpoints import commit


def test_the_order_is_that_of_the_commits_and_each_says_whether_it_counts(tmp_path, ends):
    commit(tmp_path, 300, metrics={"loss": 0.51234}, mesh=Mesh(names=("replicate", "shard"), shape=(2, 2)), ranks=4)
    commit(tmp_path, 100, restored_from=0)  # after a rollback the newest has a lower step
    broken = commit(tmp_path, 200)
    (broken.path / "__1_0.distcp").unlink()
    (tmp_path / "step-0000000400").mkdir()
    (tmp_path / "step-0000000500.tmp-abcdef00-1").mkdir()
    (tmp_path / "step-300-backup").mkdir()
    lines = ends(0, "list", tmp_path).out.splitlines()
    assert lines[0].split() == ["step", "age", "size", "ranks", "mesh", "metrics", "state"]
    assert [line.split()[0] for line in lines[1:5]] == ["400", "300", "100", "200"]
    assert lines[1].endswith("does not count: it has no manifest.json")
    assert lines[2].endswith("4  replicate 2 x shard 2  loss=0.5123  complete")
    assert lines[4].endswith("does not count: __1_0.distcp is missing")
    assert lines[-1].startswith("2 complete checkpoints, ")
    assert "the newest is of step 100. 2 do not count. 1 folder besides" in lines[-1]


def test_damage_is_told_without_the_path_of_the_checkpoint_however_the_root_is_named(tmp_path, monkeypatch, ends):
    for step, named in ((10, str(tmp_path / "run")), (20, "/mnt/run")):
        entry = commit(tmp_path / "run", step)
        remember_damage(entry.path, entry.require_manifest(), f"{named}/{entry.path.name}/__0_0.distcp is cut; see it")
    monkeypatch.chdir(tmp_path)
    for root in ("run", str(tmp_path / "run")):
        told = [line.partition("damaged: ")[2] for line in ends(0, "list", root).out.splitlines()[1:3]]
        assert told == ["__0_0.distcp is cut", "/mnt/run/step-0000000020/__0_0.distcp is cut"]


def test_several_roots_are_a_line_each_and_a_bad_one_hides_no_other(tmp_path, monkeypatch, ends):
    monkeypatch.chdir(tmp_path)
    for step in (10, 20):
        commit(tmp_path / "a", step)
    (commit(tmp_path / "b", 30).path / "__1_0.distcp").unlink()
    (tmp_path / "file").touch()
    printed = ends(10, "list", "a", "file", "gone", "b", "[x]*", "a/")
    rows = {line.split()[0]: line for line in printed.out.splitlines()}
    assert list(rows) == ["root", "a", "file", "gone", "b", "[x]*"]
    assert rows["a"].split()[1] == "20"
    assert rows["a"].endswith("complete")
    assert rows["b"].endswith("no complete checkpoint, 1 does not count")
    assert "is a file" in rows["file"]
    assert "there is no checkpoint root gone" in rows["gone"]
    assert printed.err == "Error: 3 of 5 roots could not be listed: see above\n"
    told = json.loads(ends(0, "list", "*", "--json").out)
    assert [each["root"] for each in told] == ["a", "b"]

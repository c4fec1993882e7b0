from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from ckptman.cli.app import main
from ckptman.cli.verify import parse_world_sizes
from ckptman.store.catalogue import Entry
from ckptman.store.digest import digest_bytes
from ckptman.store.index import Index
from ckptman.store.manifest import FileRecord
from tests.fake_checkpoint import commit, flip_byte


def _rewrite_index(entry: Entry, name: str, index: Index) -> None:
    """Put another index in a checkpoint, with digests that are right."""
    manifest = entry.require_manifest()
    data = index.to_json()
    (entry.path / name).write_bytes(data)
    files = {**manifest.files, name: FileRecord(bytes=len(data), digest=digest_bytes(data))}
    (entry.path / "manifest.json").write_bytes(manifest.model_copy(update={"files": files}).to_json())


def test_a_good_one_is_proved_and_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit(tmp_path, 100)
    commit(tmp_path, 200)
    assert main(["verify", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("step 200: good, 5 files, ")
    assert told.out.endswith("every byte matches its digest; 1 tensor, all complete\n")
    assert told.err == ""


@pytest.mark.parametrize("name", ["__0_0.distcp", "index-00001.json", ".metadata"])
def test_one_changed_byte_in_any_file_is_found(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = commit(tmp_path, 100)
    flip_byte(entry.path / name)
    assert main(["verify", str(tmp_path), "--threads", "1"]) == 4
    told = capsys.readouterr()
    assert f"  {name} does not match its digest" in told.out
    assert "1 of 1 checkpoint damaged or incomplete: step 100" in told.err


def test_all_of_a_root_are_looked_at_whatever_the_first_ones_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (100, 200, 300):
        commit(tmp_path, step)
    flip_byte(tmp_path / "step-0000000100" / "__1_0.distcp")
    (tmp_path / "step-0000000200" / "__1_0.distcp").unlink()
    assert main(["verify", str(tmp_path)]) == 0  # the newest is good
    capsys.readouterr()
    assert main(["verify", str(tmp_path), "--all", "--json"]) == 4
    told = capsys.readouterr()
    found = {each["step"]: each for each in json.loads(told.out)["checkpoints"]}
    assert [found[step]["good"] for step in (100, 200, 300)] == [False, False, True]
    assert "__1_0.distcp does not match" in found[100]["problems"][0]
    assert found[200]["problems"] == ["__1_0.distcp is missing"]
    assert "2 of 3 checkpoints damaged or incomplete: step 100, step 200" in told.err


def test_a_tensor_with_a_hole_is_damaged_though_every_byte_is_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = commit(tmp_path, 100)
    _rewrite_index(entry, "index-00001.json", Index())
    assert main(["verify", str(tmp_path)]) == 4
    assert "model.weight" in capsys.readouterr().out


def test_an_index_that_cannot_be_read_is_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = commit(tmp_path, 100)
    (tensor,) = Index.model_validate_json((entry.path / "index-00001.json").read_bytes()).tensors.values()
    away = tensor.chunks[0].at.model_copy(update={"file": "../../etc/passwd"})
    lying = tensor.model_copy(update={"chunks": [tensor.chunks[0].model_copy(update={"at": away})]})
    _rewrite_index(entry, "index-00001.json", Index(tensors={"model.weight": lying}))
    assert main(["verify", str(tmp_path)]) == 4
    assert "which the manifest does not name" in capsys.readouterr().out


def test_a_damaged_one_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip_byte(commit(tmp_path, 100).path / "__0_0.distcp")
    monkeypatch.setattr(subprocess, "Popen", pytest.fail)
    assert main(["verify", str(tmp_path), "--world-size", "1,2"]) == 4


def test_a_terminal_sees_a_bar_that_goes_away(tmp_path: Path) -> None:
    commit(tmp_path, 100)
    ours, theirs = pty.openpty()
    ran = subprocess.run(
        [sys.executable, "-c", "import ckptman.cli; ckptman.cli.main()", "verify", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=theirs,
        timeout=60,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    )
    os.close(theirs)
    drawn = os.read(ours, 65536)
    os.close(ours)
    assert ran.returncode == 0
    assert b"step 100" in drawn
    assert drawn.rstrip().endswith(b"\x1b[2K")  # the last thing done is to clear the line
    assert ran.stdout.startswith(b"step 100: good")


def test_world_sizes_as_they_are_written() -> None:
    assert parse_world_sizes(None) == []
    assert parse_world_sizes("1, 2,4,2") == [1, 2, 4]

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
from ckptman.store.names import CHUNKS, INDEX
from tests.fake_checkpoint import commit, flip_byte


def _rewrite(entry: Entry, name: str, data: bytes) -> None:
    """Put other bytes in a file of a checkpoint, with digests that are right."""
    manifest = entry.require_manifest()
    (entry.path / name).write_bytes(data)
    files = {**manifest.files, name: FileRecord(bytes=len(data), digest=digest_bytes(data))}
    (entry.path / "manifest.json").write_bytes(manifest.model_copy(update={"files": files}).to_json())


def test_a_good_one_is_proved_and_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit(tmp_path, 100)
    commit(tmp_path, 200)
    assert main(["verify", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("step 200: good, 7 files, ")
    assert told.out.endswith("every byte matches its digest; 1 tensor, all complete\n")
    assert told.err == ""


@pytest.mark.parametrize("name", ["__0_0.distcp", "blocks-00001.bin", "chunks.bin", "index.json", ".metadata"])
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
    index = Index.model_validate_json((entry.path / INDEX).read_bytes())
    half = index.tensors["model.weight"].model_copy(update={"count": 1})
    _rewrite(entry, INDEX, index.model_copy(update={"tensors": {"model.weight": half}}).to_json())
    assert main(["verify", str(tmp_path)]) == 4
    assert "  model.weight [8, 4]: element [4, 0] was saved 0 times, not once" in capsys.readouterr().out


def test_an_index_that_cannot_be_read_is_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = commit(tmp_path, 100)
    index = Index.model_validate_json((entry.path / INDEX).read_bytes())
    away = {"model.0": {"file": "../../etc/passwd", "offset": 0, "bytes": 16}}
    _rewrite(entry, INDEX, json.dumps({**index.model_dump(), "objects": away}).encode())
    assert main(["verify", str(tmp_path)]) == 4
    assert "which the manifest does not name" in capsys.readouterr().out


def test_a_chunk_table_that_points_elsewhere_is_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = commit(tmp_path, 100)
    index = Index.model_validate_json((entry.path / INDEX).read_bytes())
    lying = index.model_copy(update={"files": ["__0_0.distcp", "../../etc/passwd"]})
    _rewrite(entry, INDEX, lying.to_json())
    assert main(["verify", str(tmp_path)]) == 4
    assert "lies outside of its file" in capsys.readouterr().out
    entry = commit(tmp_path, 200)
    _rewrite(entry, CHUNKS, (entry.path / CHUNKS).read_bytes()[:-8])
    assert main(["verify", str(tmp_path)]) == 4
    assert "model.weight: its rows (2 from number 0) are not in the table" in capsys.readouterr().out


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

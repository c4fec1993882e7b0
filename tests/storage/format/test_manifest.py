"""Files of JSON that somebody else wrote, or that were edited: what is wrong with them is said in words."""

import pytest

from ckptman.cli.app import main
from ckptman.errors import CorruptError
from ckptman.storage.format.index import read_index
from ckptman.storage.format.manifest import FileRecord, parse_versioned, read_manifest
from ckptman.storage.format.paths import INDEX, MANIFEST
from ckptman.storage.io.checksums import digest_bytes
from tests.helpers.checkpoints import commit

FLAWS = [
    (b"{}", "it has no format_version"),
    (b'{"step": 3}', "it has no format_version"),
    (b"[]", "it is not a JSON object"),
    (b"[1, 2]", "it is not a JSON object"),
    (b"null", "it is not a JSON object"),
    (b'"format_version"', "it is not a JSON object"),
    (b"7", "it is not a JSON object"),
    (b"", "it is not JSON from line 1, column 1 on"),
    (b'{"format_version": 1,\n "step": }', "it is not JSON from line 2, column 10 on"),
    (b'{"a": "\xff\xfe\x00"}', "it is not text from byte 7 on"),
    (b"[" * 200_000, "it is nested too deeply"),
    (b'{"format_version": ' + b"1" * 5000 + b"}", "it has a number of too many digits"),
]


@pytest.mark.parametrize(("data", "flaw"), FLAWS)
def test_a_file_that_is_something_else_is_told_in_words(data, flaw, tmp_path):
    with pytest.raises(CorruptError) as caught:
        parse_versioned(tmp_path / "x.json", data)
    told = str(caught.value)
    assert told.startswith(f"{tmp_path / 'x.json'} is not what ckptman wrote there: {flaw}; restore an older")
    assert "Error" not in told


@pytest.mark.parametrize(("data", "flaw"), FLAWS[:6])
def test_the_manifest_and_the_index_say_it(data, flaw, tmp_path, capsys):
    entry = commit(tmp_path, 1)
    manifest = read_manifest(entry.path)
    (entry.path / INDEX).write_bytes(data)
    record = FileRecord(bytes=len(data), digest=digest_bytes(data, manifest.block_bytes))
    edited = manifest.model_copy(update={"files": {**manifest.files, INDEX: record}})
    with pytest.raises(CorruptError, match=rf"{INDEX} is not what ckptman wrote there: {flaw};"):
        read_index(entry.path, edited)
    (entry.path / MANIFEST).write_bytes(data)
    assert main(["verify", str(entry.path)]) == 4
    assert f"{MANIFEST} is not what ckptman wrote there: {flaw};" in capsys.readouterr().out


def test_an_index_that_is_nested_too_deeply_is_told_in_words(tmp_path, monkeypatch):
    entry = commit(tmp_path, 1)
    for error, flaw in ((RecursionError, "it is nested too deeply"), (MemoryError, "it does not fit the memory")):

        def refuse(*args, error=error, **more):
            raise error

        monkeypatch.setattr("ckptman.storage.format.index.Index.model_validate", refuse)
        with pytest.raises(CorruptError, match=rf"not what ckptman writes there \({flaw}\)"):
            read_index(entry.path, read_manifest(entry.path))

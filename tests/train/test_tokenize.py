"""Tokenising: the same result for any number of threads, and a result that is whole or not there."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ckptman.errors import ConfigError, ExistsError, NotFoundError
from ckptman.storage.io.checksums import digest_file, digest_of_blocks
from ckptman.storage.io.durable_files import DISK
from ckptman.train import tokenize as module
from ckptman.train.dataset.tokenfile import META, TOKENIZER, TOKENS, dtype_for, map_tokens, read_meta
from ckptman.train.tokenize import END_OF_TEXT, find_files, main, read_pieces, tokenize

SOURCES = Path(module.__file__).parent.parent


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    (folder / "inner").mkdir(parents=True)
    (folder / "b.txt").write_text("the cat sat on the mat\r\nthe end\n" * 50)
    (folder / "inner" / "a.txt").write_text(f"a document that says {END_OF_TEXT} in its text, naïve café 猫\n" * 20)
    (folder / "c.txt").write_bytes(b"broken \xff\xfe bytes \x80 and a last line without an end")
    (folder / "empty.txt").write_text("")
    (folder / "other.md").write_text("not asked for")
    return folder


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
def test_the_result_does_not_depend_on_the_number_of_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PIECE_CHARACTERS", 20_000)  # many pieces, so that threads finish out of order
    for workers in (1, 2, 3):
        tokenize(tmp_path / str(workers), [SOURCES], vocab_size=600, workers=workers, glob="*.py")
    assert contents(tmp_path / "1") == contents(tmp_path / "2") == contents(tmp_path / "3")
    assert set(contents(tmp_path / "1")) == {TOKENS, META, TOKENIZER}


def test_documents_come_back_in_sorted_order_with_an_end_each(texts, tmp_path):
    from tokenizers import Tokenizer

    out = tmp_path / "out"
    meta = tokenize(out, [texts], vocab_size=400, workers=1, glob="*.txt")
    assert read_meta(out) == meta
    tokens = map_tokens(out, meta)
    assert meta.count == len(tokens)
    assert meta.sources == 3
    assert meta.vocab_size <= 400
    assert meta.digest == digest_of_blocks(digest_file(out / TOKENS)[1])
    tokenizer = Tokenizer.from_file(str(out / TOKENIZER))
    ends = np.flatnonzero(tokens == meta.eos_id)
    assert ends[-1] == len(tokens) - 1
    documents = [tokenizer.decode(part[:-1].tolist()) for part in np.split(tokens, ends + 1)[:-1]]
    files = [texts / "b.txt", texts / "c.txt", texts / "inner" / "a.txt"]
    assert documents == [file.read_bytes().decode(errors="replace") for file in files]


def test_large_files_are_read_in_whole_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PIECE_CHARACTERS", 10)
    file = tmp_path / "lines.txt"
    file.write_text("one line\nanother line\r\nthe last", newline="")
    pieces = list(read_pieces(file))
    assert pieces == ["one line\nanother line\r\n", "the last"]


def test_files_are_sorted_unique_and_not_empty_and_without_excluded_folders(texts):
    for name in ("site-packages/d.txt", "inner/site-packages/d.txt", "site-packages.txt"):
        (texts / name).parent.mkdir(exist_ok=True)
        (texts / name).write_text("x")
    found = find_files([texts / "c.txt", texts, texts / "inner" / ".." / "b.txt"], "*.txt", ["site-packages"])
    assert found == [texts / name for name in ("b.txt", "c.txt", "inner/a.txt", "site-packages.txt")]


@pytest.mark.parametrize(
    ("source", "more", "kind", "told"),
    [
        ("", {"glob": "*.rst"}, ConfigError, "no files that match"),
        ("empty.txt", {}, ConfigError, "1 files, all of them empty"),
        ("nowhere", {}, NotFoundError, "nowhere"),
        ("", {"vocab_size": 256}, ConfigError, "at least 257"),
        ("", {"workers": 0}, ConfigError, "--workers"),
        ("", {"out": "texts"}, ExistsError, "not overwritten"),
        ("", {"glob": "*.txt"}, ConfigError, r"pip install 'ckptman\[train\]'"),
    ],
)
def test_bad_input(texts, tmp_path, monkeypatch, source, more, kind, told):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    more = {"out": "out", **more}
    with pytest.raises(kind, match=told):
        tokenize(tmp_path / more.pop("out"), [texts / source], **more)
    assert not (tmp_path / "out").exists()


def test_a_failure_leaves_nothing(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(DISK, "rename", lambda source, target: (_ for _ in ()).throw(OSError("no rename")))
    with pytest.raises(OSError, match="no rename"):
        tokenize(tmp_path / "out", [texts], vocab_size=300, workers=1, glob="*.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_the_command_line(texts, tmp_path, capsys):
    before = signal.getsignal(signal.SIGTERM)
    try:
        arguments = [str(tmp_path / "out"), str(texts), "--vocab-size", "300", "--workers", "1", "--glob", "*.txt"]
        assert main(arguments) == 0
        assert "vocabulary 300, uint16" in capsys.readouterr().out
        assert main(arguments) == 5
        assert capsys.readouterr().err.startswith("error: ")
    finally:
        signal.signal(signal.SIGTERM, before)


def test_small_vocabularies_take_two_bytes_a_token():
    assert dtype_for(65_536) == "uint16"
    assert dtype_for(65_537) == "uint32"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_job_leaves_no_result(tmp_path, number):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    text = "".join(path.read_text() for path in sorted(SOURCES.rglob("*.py")))
    for index in range(8):
        (corpus / f"{index}.txt").write_text(text * (4_000_000 // len(text)))
    command = [sys.executable, "-m", "ckptman.train.tokenize", str(tmp_path / "out"), str(corpus)]
    job = subprocess.Popen(
        [*command, "--vocab-size", "300", "--workers", "2", "--train-bytes", "1"],
        stdout=subprocess.PIPE,
        env=os.environ | {"RAYON_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )
    assert job.stdout is not None
    with job:
        while b"encoding" not in job.stdout.readline():
            pass
        job.send_signal(number)
    assert job.returncode == (128 + number if number == signal.SIGTERM else -number)
    assert not (tmp_path / "out").exists()
    if number == signal.SIGTERM:
        assert [path.name for path in tmp_path.iterdir()] == ["corpus"]

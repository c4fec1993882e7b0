"""The catalogue: what counts as a checkpoint, in which order, and what an unreadable root is."""

import errno
import json
import math
import os
import re
import shutil
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptman.errors import ConfigError, CorruptError, FormatVersionError, NotFoundError, RootError
from ckptman.storage.catalog import catalog as catalogue_module
from ckptman.storage.catalog.catalog import Catalog, any_will_do
from ckptman.storage.format.manifest import Manifest, compare_names, facts_of, read_facts, read_manifest
from ckptman.storage.format.paths import (
    MAX_STEP,
    new_nonce,
    owner_path,
    parse_half_written,
    parse_owner,
    parse_step,
    step_folder,
)
from tests.helpers.faulty_disk import rewrite, save


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Nobody pulls the plug here."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def steps(root):
    """The steps that count, oldest commit first."""
    return [entry.step for entry in Catalog(root).complete()]


def problem(root, step=100):
    entry = Catalog(root).entry(step)
    assert not entry.complete
    assert entry.problem is not None
    with pytest.raises((CorruptError, FormatVersionError)):
        entry.require_manifest()
    return entry.problem


# ---- names -----------------------------------------------------------------------------------------------------------


LOOK_ALIKES = [
    *("step-7", "step-7.tmp-backup", "step-00000000100", "step-0000000100 ", " step-0000000100", "step-0000000100\n"),
    *("STEP-0000000100", "step_0000000100", "step--000000100", "step-0000000100~", "xstep-0000000100", "latest"),
    "step-\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0661",
    *(f"step-0000000100.{tag}" for tag in ("tmp", "tmp-", "tmp-a.b", "tmp-0123abcd.b", "tmp-copy", "tmp-a ", "bak-a")),
    *(f"step-0000000100.{tag}" for tag in ("tmp-best", "old-best", "abandoned-best", "trash-best", "tmp-\u0661")),
    *(f"step-0000000100.{tag}" for tag in ("old-1", "tmp-rsync", "tmp-mine", "trash-1", "old-0123abcd-best")),
    *(f"step-0000000100.{tag}" for tag in ("old-20261122", "old-20261122-1530")),
]


def test_names_that_only_resemble_ours_are_left_alone(tmp_path):
    save(tmp_path, 100)
    for name in LOOK_ALIKES:
        shutil.copytree(tmp_path / step_folder(100), tmp_path / name)
        assert parse_step(name) is None, name
    assert steps(tmp_path) == [100]
    assert Catalog(tmp_path).leftovers() == []


@pytest.mark.slow
@given(
    st.integers(0, MAX_STEP),
    st.sampled_from(["step", "tmp", "old", "abandoned", "trash"]),
    st.from_regex(
        r"\A(([0-9a-f]{7}[a-f]|(cli|drain|full-|copy-)[0-9a-f]{8})(-[0-9]+){0,2}(-left[0-9]+)?|copy-[0-9a-f]{16})\Z"
    ),
)
def test_a_name_says_what_it_was_made_of(step, kind, tag):
    parsed = parse_step(step_folder(step, kind, tag))
    assert parsed == (step, kind, "" if kind == "step" else tag)


def test_a_nonce_is_never_all_digits(monkeypatch):
    made = iter([b"\x20\x26\x11\x22", b"\x00\x00\x00\x00", b"\x20\x26\x11\x2a"])
    monkeypatch.setattr(os, "urandom", lambda count: next(made))
    assert new_nonce() == "2026112a"


def test_names_of_the_run_itself(tmp_path):
    for step in (-1, MAX_STEP + 1):
        with pytest.raises(ConfigError, match="a step is a number from 0 to"):
            step_folder(step)
    for number in (7, 12_345_678):
        assert parse_owner(owner_path(tmp_path, number).name) == number
    for name in ("owner.json", "owner-7.json", "owner-000007.json.tmp-1-0123abcd", "owner-000007.jsonl"):
        assert parse_owner(name) is None
    assert parse_half_written("outcome.json.tmp-17-0123abcd") == 17
    for name in ("outcome.json", "outcome.json.tmp-17-backup", "outcome.json.tmp-17-0123abcd~", ".tmp-17-0123abcd"):
        assert parse_half_written(name) is None


# ---- what counts -----------------------------------------------------------------------------------------------------


def test_order_is_that_of_commits_also_after_a_rollback(tmp_path):
    for step in (100, 200, 300):
        save(tmp_path, step)
    save(tmp_path, 150)
    assert steps(tmp_path) == [100, 200, 300, 150]
    save(tmp_path, 200)
    assert steps(tmp_path) == [100, 300, 150, 200]
    os.utime(tmp_path / step_folder(100))
    assert steps(tmp_path) == [100, 300, 150, 200], "dates of files tell nothing"


def test_folders_that_share_a_sequence_are_told_apart_by_time_and_step(tmp_path):
    for step, seconds in ((1, 30.0), (2, 20.0), (3, 30.0)):
        rewrite(save(tmp_path, step).path, sequence=1, time_seconds=seconds)
    assert steps(tmp_path) == [2, 1, 3]


def as_link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda path: (path / "__1_0.distcp").unlink(), "__1_0.distcp is missing"),
        (lambda path: os.truncate(path / "__1_0.distcp", 31), "has 31 bytes instead of 32"),
        (lambda path: os.truncate(path / "__1_0.distcp", 33), "has 33 bytes instead of 32"),
        (lambda path: (path / "manifest.json").unlink(), "it has no manifest.json"),
        (lambda path: os.truncate(path / "manifest.json", 300), "not what ckptman wrote"),
        (b"", "not what ckptman wrote"),
        (b"[]", "not what ckptman wrote"),
        (b'"text"', "not what ckptman wrote"),
        (b"{}", "not what ckptman wrote"),
        (b"\xff\xfe\0", "not what ckptman wrote"),
        (b"[" * 100_000, "not what ckptman wrote"),
        (b'{"format_version": 1}', "no digest at its end"),
        ({"step": 200}, "its manifest is of step 200"),
        ({"surprise": 1}, r"\(format version 1\): surprise: unknown field"),
        ({"sequence": None}, "sequence: Field required"),
        ({"sequence": 0}, "sequence: "),
        ({"block_bytes": 0}, "block_bytes: "),
        ({"block_bytes": 2**60}, "block_bytes: "),
        ({"world_size": "many"}, "world_size: "),
        ({"time_seconds": math.nan}, "time_seconds: "),
        ({"files": {"a": {"bytes": -1, "digest": "0" * 32}}}, "files.a.bytes: "),
        ({"files": {"a": {"bytes": 1, "digest": "0" * 31}}}, "files.a.digest: "),
        ({"format_version": 0}, "which there never was"),
        ({"format_version": True}, "which there never was"),
        ({"format_version": "2"}, "which there never was"),
        ({"format_version": 2, "surprise": 1}, "format version 2 is newer"),
        *(
            ({"files": {name: {"bytes": 0, "digest": "0" * 32}}}, "not a plain file name")
            for name in ("", ".", "..", "a/b", "/etc/passwd", "../a", "a\0b")
        ),
        (lambda path: as_link(path), "it is a link, not a folder"),
        *(
            (lambda path, name=name: as_link(path / name), f"{name} is not a regular file")
            for name in ("__0_0.distcp", "index.json", "manifest.json")
        ),
        # What is no file does not hang.
        *(
            (lambda path, name=name, make=make: (path / name).unlink() or make(path / name), "is not a regular file")
            for name in ("__0_0.distcp", "manifest.json")
            for make in (Path.mkdir, os.mkfifo)
        ),
    ],
)
def test_what_does_not_count(tmp_path, damage, complaint):
    """`damage`: what is done to a folder, the text of its manifest, or fields of it."""
    save(tmp_path, 50)
    path = save(tmp_path, 100).path
    if callable(damage):
        damage(path)
    elif isinstance(damage, bytes):
        (path / "manifest.json").write_bytes(damage)
    else:
        rewrite(path, **damage)
    assert 100 not in steps(tmp_path)
    assert re.search(complaint, problem(tmp_path))


def test_a_newer_format_is_told_apart_from_damage(tmp_path):
    rewrite(save(tmp_path, 100).path, format_version=7, sequence=None, shards={})
    entry = Catalog(tmp_path).entry(100)
    assert entry.newer_format is not None
    with pytest.raises(FormatVersionError, match="has format version 7, and this ckptman reads up to 1: upgrade"):
        entry.require_manifest()
    # Without a digest at its end too: a newer format may have moved it.
    (entry.path / "manifest.json").write_text('{"format_version": 8}')
    assert Catalog(tmp_path).entry(100).newer_format is not None


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda path: path.touch(), "it is a file, not a folder"),
        (lambda path: path.mkdir(), "it has no manifest.json"),
        (lambda path: path.symlink_to("nowhere"), "it is a link"),
        (lambda path: path.symlink_to(path.name), "it is a link"),
        (os.mkfifo, "it is a file, not a folder"),
    ],
)
def test_what_only_has_the_name(tmp_path, make, complaint):
    make(tmp_path / step_folder(100))
    assert complaint in problem(tmp_path)
    assert Catalog(tmp_path).leftovers() == []


def test_a_file_more_than_the_manifest_names_does_no_harm(tmp_path):
    (save(tmp_path, 100).path / "notes.txt").touch()
    assert steps(tmp_path) == [100]


def test_every_byte_of_a_manifest_is_vouched_for(tmp_path):
    path = save(tmp_path, 100).path / "manifest.json"
    data = path.read_bytes()
    in_its_end = range(8 * (len(data) - 60), 8 * len(data))
    for bit in {*range(0, 8 * len(data), 37), *in_its_end}:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(CorruptError):
            read_manifest(path.parent)
        assert read_facts(path.parent) is None


@pytest.mark.parametrize("name", ["order", "\ud800"])
def test_the_facts_of_a_manifest_are_those_of_all_of_it(tmp_path, name):
    path = save(tmp_path, 100).path
    rewrite(path, attempt=7, metrics={name: math.nan, "b": 1.5}, nonfinite={"metrics": [name], "tensors": ["w"]})
    facts = facts_of(read_manifest(path))
    assert facts.nonfinite_reason
    assert facts.attempt == 7
    read = read_facts(path)
    if name == "order":
        assert repr(read) == repr(facts)
    else:
        assert read is None, "all of it is read"
    assert [entry.record() for entry in Catalog(tmp_path).scan(until=any_will_do)][
        -1
    ].nonfinite_reason == facts.nonfinite_reason


@pytest.mark.parametrize(
    "fields",
    [
        {"step": True},
        {"sequence": "1"},
        {"time_seconds": None},
        {"metrics": {"loss": "1"}},
        {"metrics": []},
        {"files": []},
        {"files": {"a": {}}},
        {"nonfinite": 1},
        {"format_version": 2},
    ],
)
def test_a_manifest_with_other_types_tells_no_facts(tmp_path, fields):
    path = save(tmp_path, 100).path
    rewrite(path, **fields)
    assert read_facts(path) is None


def test_a_manifest_comes_back_as_it_was_written(tmp_path):
    entry = save(tmp_path, 100)
    fields = {
        **entry.require_manifest().model_dump(),
        "metrics": {"loss": math.nan, "best": -math.inf, "\u03b1/\ud800": 1e-300},
        "reason": "odd \u2603 \ud800 \0 text",
        "mesh": {"names": ["replicate", "shard"], "shape": [2, 4]},
        "restored_from": 50,
    }
    manifest = Manifest.model_validate(fields)
    (entry.path / "manifest.json").write_bytes(manifest.to_json())
    back = read_manifest(entry.path)
    assert back.to_json() == manifest.to_json()
    assert math.isnan(back.metrics["loss"])
    assert back.total_bytes == manifest.total_bytes > 64
    assert json.loads(manifest.to_json())["sequence"] == 1, "any reader of JSON can read it"


# ---- the previous save of a step -------------------------------------------------------------------------------------


def aside(entry, tag="deadbeef"):
    path = entry.path.with_name(f"{entry.path.name}.old-{tag}")
    entry.path.rename(path)
    return path


def test_a_save_that_stood_aside_counts_until_the_new_one_is_there(tmp_path):
    save(tmp_path, 50)
    old = aside(save(tmp_path, 100))
    assert steps(tmp_path) == [50, 100]
    assert Catalog(tmp_path).entry(100).path == old
    assert Catalog(tmp_path).leftovers() == [], "it is the only one of its step"
    new = save(tmp_path, 100)
    assert Catalog(tmp_path).entry(100).path == new.path
    assert [path for path, _ in Catalog(tmp_path).leftovers()] == [old]


@pytest.mark.parametrize("tags", ["aaaaaaaa ffffffff", "ffffffff aaaaaaaa"])
def test_of_several_that_stood_aside_the_last_committed_counts(tmp_path, tags):
    first, second = (aside(save(tmp_path, 100), tag) for tag in tags.split())
    assert Catalog(tmp_path).entry(100).path == second
    assert [path for path, _ in Catalog(tmp_path).leftovers()] == [first]


def test_a_good_one_that_stood_aside_stands_in_for_a_damaged_one(tmp_path):
    old = aside(save(tmp_path, 100))
    (save(tmp_path, 100).path / "__0_0.distcp").unlink()
    assert Catalog(tmp_path).entry(100).path == old
    assert Catalog(tmp_path).entry(100).complete
    assert Catalog(tmp_path).leftovers() == [], "the only good one is never a leftover"
    (old / "__0_0.distcp").unlink()
    assert Catalog(tmp_path).entry(100).path == tmp_path / step_folder(100)


def test_one_that_stood_aside_does_not_hide_a_newer_format(tmp_path):
    aside(save(tmp_path, 100))
    rewrite(save(tmp_path, 100).path, format_version=2)
    assert Catalog(tmp_path).entry(100).newer_format is not None


# ---- the root --------------------------------------------------------------------------------------------------------


def test_a_root_that_is_not_there_is_a_file_or_is_empty(tmp_path):
    with pytest.raises(NotFoundError, match="there is no checkpoint root"):
        Catalog(tmp_path / "nowhere").scan()
    assert Catalog(tmp_path).scan() == []
    with pytest.raises(NotFoundError, match="no checkpoint of step 5; the latest there are: none"):
        Catalog(tmp_path).entry(5)
    for step in (300, 100):
        save(tmp_path, step)
    with pytest.raises(NotFoundError, match="no checkpoint of step 5; the latest there are: 300, 100"):
        Catalog(tmp_path).entry(5)
    (tmp_path / "file").touch()
    with pytest.raises(RootError, match="is a file, not a folder: name another root"):
        Catalog(tmp_path / "file").scan()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE, errno.ELOOP])
def test_a_root_that_cannot_be_read_is_never_an_empty_one(tmp_path, monkeypatch, code):
    save(tmp_path, 100)

    scandir = os.scandir

    def refuse(path):
        if path == tmp_path:
            raise OSError(code, os.strerror(code), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    for look in (Catalog(tmp_path).scan, Catalog(tmp_path).complete, Catalog(tmp_path).leftovers):
        with pytest.raises(RootError, match=r"cannot be read .*: nothing is started over what may be there") as caught:
            look()
        assert caught.value.errno == code


@pytest.mark.parametrize("reader", ["read_manifest", "compare_names"])
def test_a_checkpoint_that_cannot_be_looked_at_is_no_missing_one(tmp_path, monkeypatch, reader):
    save(tmp_path, 100)

    def refuse(path, *rest):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(catalogue_module, reader, refuse)
    for until in (None, any_will_do):
        with pytest.raises(RootError, match=r"cannot be read .*: check its permissions"):
            Catalog(tmp_path).scan(until=until)
    with pytest.raises(RootError, match=r"cannot be read .*: check its permissions"):
        Catalog(tmp_path).entry(100).require_manifest()
    (entry,) = Catalog(tmp_path).look()
    assert (entry.complete, entry.manifest) == (False, None)


def test_an_earlier_save_does_not_stand_in_for_one_that_cannot_be_read(tmp_path, monkeypatch):
    """The later one may well be good, and the earlier one may be all there is: neither goes."""
    save(tmp_path, 100)
    shutil.copytree(tmp_path / step_folder(100), tmp_path / step_folder(100, "old", "deadbeef-1"))
    real = catalogue_module.read_manifest

    def refuse(path):
        if path.name == step_folder(100):
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return real(path)

    monkeypatch.setattr(catalogue_module, "read_manifest", refuse)
    (entry,) = Catalog(tmp_path).look()
    assert entry.unreadable is not None
    assert Catalog(tmp_path).leftovers() == []
    with pytest.raises(RootError, match=r"cannot be read \(Stale file handle\): check the mount"):
        Catalog(tmp_path).scan()


# ---- while others write ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", ["read_manifest", "compare_names"])
def test_a_folder_that_vanishes_while_it_is_looked_at(tmp_path, monkeypatch, reader):
    for step in (100, 200):
        save(tmp_path, step)
    read = getattr(catalogue_module, reader)

    def late(folder, *rest):
        if folder.name == step_folder(100):
            shutil.rmtree(folder)
        return read(folder, *rest)

    monkeypatch.setattr(catalogue_module, reader, late)
    assert [entry.step for entry in Catalog(tmp_path).scan(until=lambda entry: False)] == [200]


@pytest.mark.parametrize("until", [None, any_will_do])
def test_a_step_that_is_replaced_while_it_is_looked_at(tmp_path, monkeypatch, until):
    """The manifest of the old and the files of the new one would look damaged."""
    save(tmp_path, 100, b"short")

    def late(folder, manifest):
        monkeypatch.setattr(catalogue_module, "compare_names", compare_names)
        save(tmp_path, 100, b"much longer")
        return compare_names(folder, manifest)

    monkeypatch.setattr(catalogue_module, "compare_names", late)
    (entry,) = Catalog(tmp_path).scan(until=until)
    assert entry.complete
    assert entry.sequence == 2


def test_a_step_never_disappears_while_it_is_saved_again(tmp_path):
    save(tmp_path, 100)
    enough = threading.Event()

    def save_on():
        for _ in range(100):
            save(tmp_path, 100)
        enough.set()

    writer = threading.Thread(target=save_on)
    writer.start()
    last = looks = 0
    while not enough.is_set():
        (entry,) = Catalog(tmp_path).scan(until=any_will_do if looks % 2 else None)
        assert entry.complete
        assert entry.sequence >= last
        last, looks = entry.sequence, looks + 1
    writer.join()
    assert looks > 3

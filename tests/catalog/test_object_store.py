"""Object stores that are not as a copy expects them: addresses that are none, objects of others, other bytes, races."""

import itertools
import json
from types import SimpleNamespace

import pytest

import ckptman
from ckptman.catalog.backends import object_store
from ckptman.catalog.backends.backend import find_url
from ckptman.catalog.backends.local import LocalBackend
from ckptman.catalog.backends.object_store import COPYING, ObjectBackend
from ckptman.catalog.backends.source import GoneError
from ckptman.catalog.catalog import Catalog
from ckptman.catalog.tiers import write_tiers
from ckptman.cli.app import main
from ckptman.errors import BusyError, ConfigError, CorruptError, ExistsError, NotFoundError, RootError
from ckptman.transfer import copy as copying
from ckptman.transfer.copy import CopyOptions, copy_checkpoint
from ckptman.transfer.copy_bytes import move
from tests.helpers.checkpoints import commit
from tests.helpers.faulty_disk import holds
from tests.helpers.object_store import bucket_fixture, proxy_fixture

__all__ = ["bucket_fixture", "proxy_fixture"]

Told = pytest.CaptureFixture[str]
FOLDER = "step-0000000100"
DATA = f"{FOLDER}/__0_0.distcp"
MANIFEST = f"{FOLDER}/manifest.json"
NOTE = f"{FOLDER}/{COPYING}"


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commit(tmp_path / "root", 100)
    return tmp_path / "root"


@pytest.fixture
def other(tmp_path):
    """Another checkpoint of the same step."""
    commit(tmp_path / "other", 100, rows=16)
    return tmp_path / "other"


@pytest.fixture
def place():
    """A store in memory, which fails in no way that it is not told to."""
    place = ObjectBackend("memory://hard/runs")
    place.attempts, place.first_seconds = 2, 0.0
    place.fs.store.clear()
    return place


class Refused(Exception):
    """What botocore raises, as far as anybody looks at it."""

    def __init__(self, code):
        self.response = {"Error": {"Code": code}}


def upload(root, place, **means):
    return copy_checkpoint(Catalog(root).entry(100), place, CopyOptions(**means))


def change_byte(place, name):
    path = f"{place.prefix}/{name}"
    data = bytearray(place.fs.cat_file(path))
    data[0] ^= 1
    place.fs.pipe_file(path, bytes(data))


def once_after(place, method, what, which=""):
    """What somebody else does right after the first such request."""
    original, done = getattr(place, method), list[int]()

    def call(*arguments):
        answer = original(*arguments)
        if not done and which in str(arguments[0]):
            done.append(1)
            what()
        return answer

    setattr(place, method, call)


@pytest.mark.parametrize(
    "written",
    ["s3:///bucket/x", "S3://b/x", "s3://", "s3:", "s3:bucket/x", "file:///p", "file://p", "gs:///x", "https:///", ""],
)
def test_what_is_meant_for_an_address_is_never_taken_for_a_folder(written, root, tmp_path, capsys):
    with pytest.raises(ConfigError, match=r"\./" if written else "empty"):
        find_url(written)
    for arguments in (["copy", str(root), written], ["copy", written, "x"], ["list", written]):
        assert main(arguments) == 2
        assert "Error: " in capsys.readouterr().err
    with pytest.raises(ConfigError):
        write_tiers(root, [ckptman.Tier(written)])
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_a_folder_with_the_name_of_an_address_can_be_named(root, tmp_path):
    assert find_url(" s3://bucket/x ") == "s3://bucket/x"
    assert main(["copy", str(root), "./s3:/bucket/x"]) == 0
    assert holds(tmp_path / "s3:" / "bucket" / "x") == holds(root)
    assert main(["verify", "./s3:/bucket/x"]) == 0
    assert main(["copy", "./s3:/bucket/x", "back"]) == 0


@pytest.mark.parametrize(
    "verb",
    ["show", "verify", "verify --all", "prune", "pin --why=x", "drain", "rollback --to-step=1", "export", "diff"],
)
def test_other_verbs_say_that_they_are_not_for_object_stores(verb, root, capsys):
    arguments = [*verb.split(), "s3://bucket/runs", *["out"] * (verb in ("export", "diff"))]
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert "s3://bucket/runs is in an object store, and this command is not for those: copy it to a folder" in told
    assert main(["export", str(root), "s3://bucket/out"]) == 2


def test_objects_of_others_are_not_touched(root, place):
    theirs = {f"{FOLDER}/eval/results.json": b"precious", f"{FOLDER}/.metadata": b"plain"}
    for name, data in theirs.items():
        place.write(name, data)
    with pytest.raises(ExistsError, match=r"objects in it that are of no copy, such as \.metadata.*--overwrite"):
        upload(root, place)
    assert {name: place.read(name, 0, size) for name, size in place.listing().items()} == theirs
    with pytest.raises(ExistsError, match=r"of no checkpoint, such as \.metadata: move them away"):
        upload(root, place, overwrite=True)
    assert {name: place.read(name, 0, size) for name, size in place.listing().items()} == theirs
    place.remove(f"{FOLDER}/eval/results.json")
    with pytest.raises(ExistsError, match=r"of no checkpoint, such as \.metadata: move them away"):
        upload(root, place, overwrite=True)
    place.write(f"{FOLDER}/__0_0.distcp", b"x")
    upload(root, place, overwrite=True)  # what is left of a checkpoint
    assert [entry.complete for entry in place.look()] == [True]


def test_the_marker_of_an_empty_folder_is_in_nobody_s_way(root, bucket, proxy):
    place = ObjectBackend(f"s3://{bucket}/runs")
    for folder in ("runs/", f"runs/{FOLDER}/"):
        place.fs.call_s3("put_object", Bucket=bucket, Key=folder, Body=b"")
    assert not upload(root, place).already
    assert [entry.complete for entry in place.look()] == [True]


def test_an_object_that_was_damaged_is_found_and_replaced(root, place, capsys):
    upload(root, place)
    change_byte(place, DATA)
    with pytest.raises(ExistsError, match=r"is damaged there: __0_0\.distcp does not match its digest.*--overwrite"):
        upload(root, place)
    copied = upload(root, place, overwrite=True)
    assert not copied.already
    assert 0 < copied.written_bytes < copied.bytes
    assert upload(root, place).already
    assert upload(root, place).verify_seconds > 0


@pytest.mark.slow
def test_a_rollback_goes_along_to_a_store_and_back(tmp_path, bucket, proxy, capsys):
    root, url = tmp_path / "run", f"s3://{bucket}/t"
    for step in (100, 200, 300):
        commit(root, step)
    write_tiers(root, [ckptman.Tier(url)])
    assert main(["drain", str(root)]) == 0
    assert main(["copy", str(root), f"{url}2", "--all"]) == 0
    assert main(["rollback", str(root), "--to-step", "200"]) == 0
    assert main(["drain", str(root)]) == 0
    assert main(["copy", str(root), f"{url}2"]) == 0
    assert main(["copy", str(root), f"{url}2"]) == 0
    for each in (url, f"{url}2"):
        assert len(ObjectBackend(each).rollbacks()) == 1
        capsys.readouterr()
        assert main(["list", each]) == 0
        told = capsys.readouterr().out
        assert "the newest is of step 200. 1 was abandoned." in told
        assert "abandoned by the rollback to step 200" in told
        assert [entry.step for entry in ObjectBackend(each).look()] == [100, 200]
        back = tmp_path / f"back{len(each)}"
        assert main(["copy", each, str(back)]) == 0
        assert [entry.step for entry in Catalog(back).scan()] == [200]
        assert main(["copy", each, str(back), "--step", "300"]) == 0  # asked for by name
        entries = Catalog(back).scan(abandoned=True)
        assert [(entry.step, bool(entry.abandoned)) for entry in entries] == [(200, False), (300, True)]


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("kind", ["memory", "s3"])
def test_of_two_that_begin_at_once_one_is_told(ends, kind, root, other, place, request):
    if kind == "s3":
        place = ObjectBackend(f"s3://{request.getfixturevalue('bucket')}/runs")
    rival = ObjectBackend(place.url)
    begun = json.dumps({"tag": "f" * 16, "host": "elsewhere", "pid": 7}).encode()
    once_after(place, "listing", lambda: upload(other, rival) if ends else rival.write(NOTE, begun), FOLDER)
    with pytest.raises(ExistsError, match="another checkpoint"):
        upload(root, place)
    assert (NOTE in rival.listing()) is not ends
    assert [entry.complete for entry in rival.look()] == [ends]
    if ends:
        assert upload(other, rival).already


def test_the_same_copy_that_ended_meanwhile_is_enough(root, place):
    once_after(place, "listing", lambda: upload(root, ObjectBackend(place.url)), FOLDER)
    assert upload(root, place).already
    assert NOTE not in place.listing()


@pytest.mark.parametrize("by", ["another", "nobody", "the same"])
def test_what_was_taken_over_meanwhile_gets_no_manifest(by, root, place, monkeypatch):
    def put(*arguments, **named):
        moved = move(*arguments, **named)
        monkeypatch.undo()
        if by == "another":
            place.write(NOTE, b'{"tag": "0123", "host": "elsewhere", "pid": 7}')
        elif by == "nobody":
            place.remove(NOTE)
        else:
            upload(root, ObjectBackend(place.url))
        return moved

    monkeypatch.setattr(copying, "move", put)
    if by == "the same":
        assert not upload(root, place).already
        assert [entry.complete for entry in place.look()] == [True]
        return
    with pytest.raises(BusyError, match=r"host elsewhere, pid 7" if by == "another" else "removed or replaced"):
        upload(root, place)
    assert [entry.complete for entry in place.look()] == [False]


def test_an_original_that_is_gone_takes_no_copy_of_somebody_else_with_it(root, place, tmp_path, monkeypatch):
    def put(*arguments, **named):
        monkeypatch.undo()
        upload(root, ObjectBackend(place.url))
        (root / FOLDER).rename(tmp_path / "gone")  # it is in the tier now, so it may go
        raise NotFoundError("it is gone")

    monkeypatch.setattr(copying, "move", put)
    with pytest.raises(GoneError):
        upload(root, place)
    assert [entry.complete for entry in place.look()] == [True]


@pytest.mark.parametrize("code", ["NotImplemented", "InvalidArgument", "AccessDenied"])
def test_a_store_that_knows_no_conditions_is_asked_without(code, root, place):
    pipe_file = place.fs.pipe_file

    def pipe(path, data, mode="overwrite"):
        if mode == "create":
            error = OSError("a header you provided implies functionality that is not implemented")
            raise error from Refused(code)
        pipe_file(path, data)

    place.fs.pipe_file = pipe
    try:
        if code == "AccessDenied":
            with pytest.raises(RootError, match=r"copying\.json could not be written"):
                upload(root, place)
        else:
            upload(root, place)
            assert [entry.complete for entry in place.look()] == [True]
    finally:
        del place.fs.pipe_file


@pytest.mark.parametrize("beside", ["manifest.json", "pinned.json"])
def test_what_is_beside_the_files_is_read_back_too(beside, root, place):
    (root / FOLDER / "pinned.json").write_text('{"why": "Table 2"}')
    write = place.write

    def write_wrong(name, data):
        write(name, b"?" * len(data) if name.endswith(beside) else data)

    place.write = write_wrong
    with pytest.raises(RootError, match=f"does not give back what was written to it .{beside} has other bytes"):
        upload(root, place)
    del place.write
    assert f"{FOLDER}/{beside}" not in place.listing()
    assert not upload(root, place).already
    assert [entry.complete for entry in place.look()] == [True]


def test_a_pin_that_was_set_later_travels_with_the_next_copy(root, place):
    upload(root, place)
    assert main(["pin", str(root / FOLDER), "--why", "Table 2"]) == 0
    assert upload(root, place).already
    pin = (root / FOLDER / "pinned.json").read_bytes()
    assert place.read(f"{FOLDER}/pinned.json", 0, len(pin)) == pin


@pytest.mark.parametrize("what", [["__1_0.distcp"], ["blocks-00001.bin"], ["__1_0.distcp", "manifest.json"], []])
def test_what_is_deleted_while_it_is_copied_out_leaves_no_draft(what, root, place, tmp_path):
    upload(root, place)
    (entry,) = place.look()
    names, read = [f"{FOLDER}/{name}" for name in what] or list(place.listing()), place.read

    def read_too_late(name, offset, size):
        for each in names if name == names[0] else ():
            place.remove(each)
        return read(name, offset, size)

    place.read = read_too_late
    with pytest.raises(GoneError, match=r"was removed, in part or as a whole.*copy again"):
        copy_checkpoint(entry, LocalBackend(tmp_path / "back"), source=place)
    assert Catalog(tmp_path / "back").leftovers() == []


def test_damage_in_a_store_is_told_by_file_and_block(root, place, tmp_path):
    upload(root, place)
    change_byte(place, DATA)
    with pytest.raises(CorruptError, match=r"__0_0\.distcp is not what was saved: block 0 \(from byte 0 on\)") as told:
        copy_checkpoint(place.look()[0], LocalBackend(tmp_path / "back"), source=place)
    assert str(told.value).endswith("It was not copied: copy another checkpoint")
    change_byte(place, f"{FOLDER}/blocks-00000.bin")  # then nobody knows the block
    with pytest.raises(CorruptError, match=r"(__0_0\.distcp|blocks-00000\.bin) is not what was saved\. It"):
        copy_checkpoint(place.look()[0], LocalBackend(tmp_path / "back"), source=place)


@pytest.mark.parametrize(("silent_seconds", "attempts"), [(0.0, 6), (10.0, 6), (60.0, 2), (1000.0, 2)])
def test_a_store_that_is_silent_is_not_asked_for_ever(silent_seconds, attempts, monkeypatch):
    now = [0.0]

    def pass_by(seconds):
        now[0] += seconds

    def ask():
        pass_by(silent_seconds)
        raise TimeoutError

    place = ObjectBackend("memory://hard/silent")
    monkeypatch.setattr(object_store, "time", SimpleNamespace(sleep=pass_by, monotonic=lambda: now[0]))
    with pytest.raises(RootError, match=f"could not be listed {attempts} times"):
        place.ask("listed", ask, "x")
    assert now[0] < 150 or silent_seconds > 60


def test_a_bucket_or_an_endpoint_that_is_none_is_told_at_once(proxy, monkeypatch, capsys):
    assert main(["list", "s3://no-such-bucket-anywhere/x"]) == 3
    assert "check bucket, prefix and endpoint" in capsys.readouterr().err
    monkeypatch.setenv("AWS_ENDPOINT_URL", "not a url")
    assert main(["list", "s3://bucket/x"]) == 10
    told = capsys.readouterr().err
    assert "could not be listed (ValueError: Invalid endpoint: not a url)" in told
    assert "check endpoint" in told


def test_a_copy_that_goes_on_tells_how_long_it_read(root, place, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(copying, "time", SimpleNamespace(monotonic=lambda: float(next(ticks)), time=lambda: 0.0))
    copied = upload(root, place)
    assert (copied.copy_seconds, copied.verify_seconds) == (1.0, 2.0)

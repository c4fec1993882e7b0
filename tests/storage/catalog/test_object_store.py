"""Object stores that are not as a copy expects them: addresses that are none, objects of others, races, kills."""

import errno
import itertools
import json
import os
from types import SimpleNamespace

import pytest

from ckptman.cli.app import main
from ckptman.errors import (
    BusyError,
    ConfigError,
    CorruptError,
    ExistsError,
    FormatVersionError,
    NotFoundError,
    RootError,
)
from ckptman.policies.retention_rules import KeepLast
from ckptman.policies.tiers import Tier
from ckptman.storage.catalog.backends import object_draft, object_store
from ckptman.storage.catalog.backends.backend import find_url
from ckptman.storage.catalog.backends.copy_source import FolderReading
from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.catalog.backends.object_draft import ObjectDraft
from ckptman.storage.catalog.backends.object_store import COPYING, ObjectBackend
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.catalog.reader_lease import GoneError
from ckptman.storage.catalog.tiers import write_tiers
from ckptman.storage.transfer import copy as copying
from ckptman.storage.transfer.copy import copy_checkpoint
from ckptman.storage.transfer.drain import prune_tier
from tests.helpers.checkpoints import commit
from tests.helpers.copies import copy, copy_back, interrupt
from tests.helpers.faulty_disk import Death, holds, rewrite
from tests.helpers.object_store import bucket_fixture, proxy_fixture
from tests.storage.catalog.test_tiers import drain

__all__ = ["bucket_fixture", "proxy_fixture"]

FOLDER = "step-0000000100"
DATA = f"{FOLDER}/__0_0.distcp"
MANIFEST = f"{FOLDER}/manifest.json"
NOTE = f"{FOLDER}/{COPYING}"
OF_ANOTHER = b'{"tag": "0123", "host": "elsewhere", "pid": 7}'


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
def place(monkeypatch):
    """A store in memory, which fails in no way that it is not told to, and for which 1 MiB is large."""
    monkeypatch.setattr(object_draft, "PART_BYTES", 2**20)
    place = ObjectBackend("memory://hard/runs")
    place.attempts, place.first_seconds = 2, 0.0
    place.fs.store.clear()
    return place


class Refused(Exception):
    """What botocore raises, as far as anybody looks at it."""

    def __init__(self, code):
        self.response = {"Error": {"Code": code}}


def upload(root, place, **options):
    return copy(root, place, 100, **options)


def whole(place):
    """Whether what a store lists is complete, one by one."""
    return [entry.complete for entry in place.look()]


@pytest.fixture
def meanwhile(monkeypatch):
    """Has somebody else do something right after, or right `before`, the first call of a function of an owner."""

    def arrange(owner, name, what, *, before=False, which=""):
        real = getattr(owner, name)

        def call(*arguments, **named):
            if which not in str(arguments[:1]):
                return real(*arguments, **named)
            monkeypatch.setattr(owner, name, real)
            if before:
                what()
            answer = real(*arguments, **named)
            if not before:
                what()
            return answer

        monkeypatch.setattr(owner, name, call)

    return arrange


# ---- addresses -------------------------------------------------------------------------------------------------------


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
        write_tiers(root, [Tier(written)])
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


@pytest.mark.parametrize(
    ("written", "url"),
    [
        (" s3://bucket/x ", "s3://bucket/x"),
        ("s3://bucket/a/", "s3://bucket/a"),
        ("s3:/bucket/a", "s3://bucket/a"),
        ("gs://bucket", "gs://bucket"),
        *((path, None) for path in ("run/checkpoints", "/run", "./s3:/x", "C:/x", "a:b")),
    ],
)
def test_an_address_is_told_from_a_path(written, url):
    assert find_url(written) == url


@pytest.mark.parametrize("url", ["s3://", "s3:///x", "nosuch://bucket/x"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ConfigError):
        ObjectBackend(url)


def test_a_folder_with_the_name_of_an_address_can_be_named(root, tmp_path):
    assert main(["copy", str(root), "./s3:/bucket/x"]) == 0
    assert holds(tmp_path / "s3:" / "bucket" / "x") == holds(root)
    assert main(["verify", "./s3:/bucket/x"]) == 0
    assert main(["copy", "./s3:/bucket/x", "back"]) == 0


@pytest.mark.parametrize(
    "verb",
    ["show", "verify", "verify --all", "prune", "pin --why=x", "drain", "rollback --to-step=1", "export", "diff"],
)
def test_other_verbs_say_that_they_are_not_for_object_stores(verb, root, capsys):
    assert main([*verb.split(), "s3://bucket/runs", *["out"] * (verb in ("export", "diff"))]) == 2
    told = capsys.readouterr().err
    assert "s3://bucket/runs is in an object store, and this command is not for those: copy it to a folder" in told
    assert main(["export", str(root), "s3://bucket/out"]) == 2


def test_a_bucket_or_an_endpoint_that_is_none_is_told_at_once(root, bucket, monkeypatch, capsys):
    with pytest.raises(NotFoundError, match="there is nothing under"):
        ObjectBackend(f"s3://{bucket}/runs").look()
    assert main(["copy", str(root), "s3://no-such-bucket-anywhere/x"]) == 3
    assert main(["list", "s3://no-such-bucket-anywhere/x"]) == 3
    assert "check bucket, prefix and endpoint" in capsys.readouterr().err
    monkeypatch.setenv("AWS_ENDPOINT_URL", "not a url")
    assert main(["list", "s3://bucket/x"]) == 10
    told = capsys.readouterr().err
    assert "could not be listed (ValueError: Invalid endpoint: not a url)" in told
    assert "check endpoint" in told


# ---- what is there ---------------------------------------------------------------------------------------------------


def test_what_is_not_complete_says_why(root, place):
    upload(root, place)
    for name, data in (
        ("step-0000000300/__0_0.distcp", b""),
        ("step-0000000400/manifest.json", b"{"),
        ("step-0000000500/manifest.json", (root / MANIFEST).read_bytes()),
        ("step-0000000600/manifest.json", b'{"format_version": 99}'),
        ("step-0000000700.tmp-x/manifest.json", b""),
        ("step-7/manifest.json", b""),
        ("notes.txt", b""),
    ):
        place.write(name, data)
    place.remove(DATA)
    problems = {entry.step: entry.problem for entry in place.look()}
    assert problems[300] == "it has no manifest.json"
    assert "is not JSON" in problems[400]
    assert problems[500] == "its manifest is of step 100"
    assert "newer than this ckptman" in problems[600]
    assert problems[100] == "__0_0.distcp is missing"
    assert len(problems) == 5
    newer = next(entry for entry in place.look() if entry.step == 600)
    with pytest.raises(FormatVersionError):
        newer.require_manifest()


def test_a_manifest_that_lies_about_names_is_refused(root, place):
    upload(root, place)
    rewrite(root / FOLDER, files={"../../etc/passwd": {"bytes": 1, "digest": "0" * 32}})
    place.write(MANIFEST, (root / MANIFEST).read_bytes())
    (entry,) = place.look()
    assert "not a plain file name" in entry.problem


def test_objects_of_others_are_not_touched(root, place):
    theirs = {f"{FOLDER}/eval/results.json": b"precious", f"{FOLDER}/.metadata": b"plain"}
    for name, data in theirs.items():
        place.write(name, data)
    for overwrite, told in (
        (False, r"objects in it that are of no copy, such as \.metadata.*--overwrite"),
        (True, r"of no checkpoint, such as \.metadata: move them away"),
    ):
        with pytest.raises(ExistsError, match=told):
            upload(root, place, overwrite=overwrite)
        assert {name: place.read(name, 0, size) for name, size in place.listing().items()} == theirs
    place.remove(f"{FOLDER}/eval/results.json")
    with pytest.raises(ExistsError, match=r"of no checkpoint, such as \.metadata: move them away"):
        upload(root, place, overwrite=True)
    place.write(DATA, b"x")
    upload(root, place, overwrite=True)  # what is left of a checkpoint
    assert whole(place) == [True]


def test_objects_whose_manifest_cannot_be_read_may_be_of_anybody(root, place):
    upload(root, place)
    place.write(f"{FOLDER}/pinned.json", b'{"why": "Table 2"}')
    place.write(MANIFEST, b'{"step": 100')
    assert [entry.may_go for entry in place.list()] == [False]


def test_the_marker_of_an_empty_folder_is_in_nobody_s_way(root, bucket, proxy):
    place = ObjectBackend(f"s3://{bucket}/runs")
    for folder in ("runs/", f"runs/{FOLDER}/"):
        place.fs.call_s3("put_object", Bucket=bucket, Key=folder, Body=b"")
    assert not upload(root, place).already
    assert whole(place) == [True]


def test_a_rollback_goes_along_to_a_store_and_back(tmp_path, place, capsys):
    root, tier, url = tmp_path / "run", place.url, f"{place.url}2"
    for step in (100, 200, 300):
        commit(root, step)
    write_tiers(root, [Tier(tier)])
    assert main(["drain", str(root)]) == 0
    assert main(["copy", str(root), url, "--all"]) == 0
    assert main(["rollback", str(root), "--to-step", "200"]) == 0
    assert main(["drain", str(root)]) == 0
    for _ in range(2):
        assert main(["copy", str(root), url]) == 0
    for each, back in ((tier, tmp_path / "back"), (url, tmp_path / "back2")):
        assert len(ObjectBackend(each).rollbacks()) == 1
        capsys.readouterr()
        assert main(["list", each]) == 0
        told = capsys.readouterr().out
        assert "the newest is of step 200. 1 was abandoned." in told
        assert "abandoned by the rollback to step 200" in told
        assert [entry.step for entry in ObjectBackend(each).look()] == [100, 200]
        assert main(["copy", each, str(back)]) == 0
        assert [entry.step for entry in Catalog(back).scan()] == [200]
        assert main(["copy", each, str(back), "--step", "300"]) == 0  # asked for by name
        entries = Catalog(back).scan(abandoned=True)
        assert [(entry.step, bool(entry.abandoned)) for entry in entries] == [(200, False), (300, True)]


def test_a_pinned_one_that_was_abandoned_stays_where_its_step_is_saved_again(tmp_path, place):
    root, tier = tmp_path / "run", Tier(place.url)
    for step in (10, 20):
        commit(root, step)
    assert main(["pin", str(root / "step-0000000020"), "--why", "Table 2"]) == 0
    drain(root, tier)
    assert main(["rollback", str(root), "--to-step", "10"]) == 0
    commit(root, 20, rows=4)
    before = place.listing("step-0000000020")
    assert [type(each.error) for each in drain(root, tier)] == [ExistsError]
    assert place.listing("step-0000000020") == before


# ---- other copies at the same time -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("kind", ["memory", "s3"])
def test_of_two_that_begin_at_once_one_is_told(ends, kind, root, other, place, meanwhile, request):
    if kind == "s3":
        request.getfixturevalue("monkeypatch").setattr(object_draft, "PART_BYTES", 5 * 2**20)
        place = ObjectBackend(f"s3://{request.getfixturevalue('bucket')}/runs")
    rival = ObjectBackend(place.url)
    begun = json.dumps({"tag": "f" * 16, "host": "elsewhere", "pid": 7}).encode()
    begin = lambda: upload(other, rival) if ends else rival.write(NOTE, begun)  # noqa: E731
    meanwhile(place, "listing", begin, which=FOLDER)
    with pytest.raises(ExistsError, match="another checkpoint"):
        upload(root, place)
    assert (NOTE in rival.listing()) is not ends
    assert whole(rival) == [ends]
    if ends:
        assert upload(other, rival).already


def test_objects_of_another_copy_that_was_begun_are_not_mixed(root, other, place):
    with pytest.raises(KeyboardInterrupt):
        upload(root, place, meter=interrupt("verifying"))
    with pytest.raises(ExistsError, match="objects of another checkpoint"):
        upload(other, place)
    upload(root, place)
    assert whole(place) == [True]


def test_the_same_copy_that_ended_meanwhile_is_enough(root, place, meanwhile):
    meanwhile(place, "listing", lambda: upload(root, ObjectBackend(place.url)), which=FOLDER)
    assert upload(root, place).already
    assert NOTE not in place.listing()


def test_another_copy_that_ends_this_very_moment_is_left_alone(root, place, tmp_path, meanwhile):
    copied = []
    meanwhile(ObjectDraft, "tidy", lambda: copied.append(upload(root, place)), before=True)
    upload(root, place)
    assert [each.already for each in copied] == [False]
    assert whole(place) == [True]
    copy_back(place, tmp_path / "back")
    assert holds(tmp_path / "back") == holds(root)


@pytest.mark.parametrize("by", ["another", "nobody", "the same"])
def test_what_was_taken_over_meanwhile_gets_no_manifest(by, root, place, meanwhile):
    take_over = {
        "another": lambda: place.write(NOTE, OF_ANOTHER),
        "nobody": lambda: place.remove(NOTE),
        "the same": lambda: upload(root, ObjectBackend(place.url)),
    }
    meanwhile(copying, "_put", take_over[by])
    if by == "the same":
        assert not upload(root, place).already
    else:
        with pytest.raises(BusyError, match=r"host elsewhere, pid 7" if by == "another" else "removed or replaced"):
            upload(root, place)
    assert whole(place) == [by == "the same"]


def test_an_original_that_is_gone_takes_no_copy_of_somebody_else_with_it(root, place, tmp_path, meanwhile):
    def go():
        upload(root, ObjectBackend(place.url))
        (root / FOLDER).rename(tmp_path / "gone")  # it is in the tier now, so it may go
        raise NotFoundError("it is gone")

    meanwhile(copying, "_put", go, before=True)
    with pytest.raises(GoneError):
        upload(root, place)
    assert whole(place) == [True]


def test_objects_that_vanish_after_they_were_read_back_are_no_copy(root, place, meanwhile):
    """Another copy of the same checkpoint gives up: it takes what was put for its own."""
    meanwhile(ObjectDraft, "publish", lambda: place.remove(DATA), before=True)
    with pytest.raises(BusyError, match="removed or replaced"):
        upload(root, place)
    assert MANIFEST not in place.listing()


def test_with_all_one_that_was_taken_over_keeps_no_other(root, place, monkeypatch, capsys):
    commit(root, 200)
    check_ours = ObjectDraft._check_ours

    def check(draft):
        if draft.where.endswith(FOLDER):
            place.remove(NOTE)
        check_ours(draft)

    monkeypatch.setattr(ObjectDraft, "_check_ours", check)
    assert main(["copy", str(root), place.url, "--all"]) == 11
    assert "step 100: not copied: " in capsys.readouterr().out
    assert [entry.step for entry in place.look() if entry.complete] == [200]


def test_who_has_nothing_to_copy_leaves_the_note_of_a_copy_that_replaces_it(root, place):
    upload(root, place)
    place.write(NOTE, OF_ANOTHER)
    assert upload(root, place).already
    assert NOTE in place.listing()


# ---- what fails, and what is gone ------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["NotImplemented", "InvalidArgument", "AccessDenied"])
def test_a_store_that_knows_no_conditions_is_asked_without(code, root, place, monkeypatch):
    pipe_file = place.fs.pipe_file

    def pipe(path, data, mode="overwrite"):
        if mode == "create":
            error = OSError("a header you provided implies functionality that is not implemented")
            raise error from Refused(code)
        pipe_file(path, data)

    monkeypatch.setattr(place.fs, "pipe_file", pipe)
    if code == "AccessDenied":
        with pytest.raises(RootError, match=r"copying\.json could not be written"):
            upload(root, place)
    else:
        upload(root, place)
        assert whole(place) == [True]


def test_one_write_that_fails_is_tried_again_from_the_front(tmp_path, place, monkeypatch):
    opened, failed = place.fs.open, list[str]()

    def flaky(path, mode, **options):
        file = opened(path, mode, **options)
        if mode == "wb" and path.endswith(".distcp") and not failed:
            write = file.write

            def once(data):
                if file.tell() and not failed:
                    failed.append(path)
                    raise ConnectionError("503")
                return write(data)

            file.write = once
        return file

    monkeypatch.setattr(place.fs, "open", flaky)
    root, seen = tmp_path / "run", []
    commit(root, 200, rows=600_000)
    copied = copy(root, place, 200, meter=copying.Meter(lambda meter: seen.append(meter.done_bytes)))
    assert failed
    assert copied.written_bytes == copied.bytes >= max(seen)
    copy_back(place, tmp_path / "back")
    assert holds(tmp_path / "back") == holds(root)


@pytest.mark.parametrize("what", [["__1_0.distcp"], ["blocks-00001.bin"], ["__1_0.distcp", "manifest.json"], []])
def test_what_is_deleted_while_it_is_copied_out_leaves_no_draft(what, root, place, tmp_path, meanwhile):
    upload(root, place)
    (entry,) = place.look()
    names = [f"{FOLDER}/{name}" for name in what] or list(place.listing())
    meanwhile(place, "read", lambda: [place.remove(each) for each in names], before=True, which=names[0])
    with pytest.raises(GoneError, match=r"was removed, in part or as a whole.*copy again"):
        copy_checkpoint(entry, LocalBackend(tmp_path / "back"), source=place)
    assert Catalog(tmp_path / "back").leftovers() == []


def test_damage_is_told_without_the_block_where_nobody_knows_it(root, place, tmp_path):
    upload(root, place)
    for name in (DATA, f"{FOLDER}/blocks-00000.bin"):
        place.write(name, b"?" * place.listing()[name])
    with pytest.raises(CorruptError, match=r"(__0_0\.distcp|blocks-00000\.bin) is not what was saved\. It") as told:
        copy_back(place, tmp_path / "back")
    assert str(told.value).endswith("It was not copied: copy another checkpoint")


@pytest.mark.parametrize("version", [None, 2])
def test_what_was_a_checkpoint_in_a_store_is_missed(version, root, place, tmp_path, capsys):
    """Damaged, or of a newer ckptman: as in a folder, the exit code says so."""
    commit(root, 200)
    assert main(["copy", str(root), place.url, "--all"]) == 0
    rewrite(root / FOLDER, format_version=version)
    place.write(MANIFEST, (root / MANIFEST).read_bytes())
    assert main(["copy", place.url, str(tmp_path / "back"), "--all"]) == (9 if version else 4)
    assert "step 100: not copied" in capsys.readouterr().out
    assert [entry.step for entry in Catalog(tmp_path / "back").scan()] == [200]


@pytest.mark.parametrize("after", [0, 1, 4, 8])
def test_what_a_killed_drain_was_removing_goes_with_the_next(after, tmp_path, place):
    root, tier, removed, remove = tmp_path / "run", Tier(place.url, retention=KeepLast(1)), [], place.remove
    for step in (10, 20):
        copy_checkpoint(commit(root, step), place)

    def killed(name):
        if len(removed) == after:
            raise Death
        removed.append(name)
        remove(name)

    place.remove = killed
    with pytest.raises(Death):
        prune_tier(tier, place)
    del place.remove
    assert place.listing("step-0000000010")
    prune_tier(tier, place)
    assert {name.partition("/")[0] for name in place.listing()} == {"step-0000000020"}


@pytest.mark.parametrize("size", [8, 200_000])
def test_an_original_that_cannot_be_read_keeps_no_other_from_a_store(size, tmp_path, place, monkeypatch):
    root, read = tmp_path / "run", FolderReading.read

    def broken(self, offset, scratch):
        if "step-0000000020" in str(self.path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self.path))
        return read(self, offset, scratch)

    commit(root, 10)
    commit(root, 20, rows=size)
    monkeypatch.setattr(FolderReading, "read", broken)
    done = {each.task.entry.step: each for each in drain(root, Tier(place.url))}
    assert done[10].copied is not None
    assert isinstance(done[20].error, RootError)
    assert "step-0000000020" in str(done[20].error)
    assert "check the mount and its permissions" in str(done[20].error)


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


def test_a_copy_that_goes_on_tells_how_long_it_read(root, place, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(copying, "time", SimpleNamespace(monotonic=lambda: float(next(ticks)), time=lambda: 0.0))
    copied = upload(root, place)
    assert (copied.copy_seconds, copied.verify_seconds) == (1.0, 2.0)

"""Copies to an S3 server and back, while it is busy, silent or away: never a lie, and never "no checkpoints"."""

import json
import random
import shutil
import subprocess
import sys
import threading

import pytest

from ckptman.catalog.backends import object_draft as objectput
from ckptman.catalog.backends import object_store
from ckptman.catalog.backends.backend import find_url
from ckptman.catalog.backends.local import LocalBackend
from ckptman.catalog.backends.object_store import COPYING, ObjectBackend
from ckptman.catalog.catalog import Catalog
from ckptman.cli.app import main
from ckptman.errors import ConfigError, CorruptError, ExistsError, FormatVersionError, NotFoundError, RootError
from ckptman.transfer.copy import CopyOptions, copy_checkpoint
from ckptman.transfer.progress import Meter
from tests.helpers.checkpoints import commit, flip_byte, note_in
from tests.helpers.faulty_disk import holds, rewrite
from tests.helpers.object_store import bucket_fixture, proxy_fixture

__all__ = ["bucket_fixture", "proxy_fixture"]

Told = pytest.CaptureFixture[str]
ATTEMPTS = 4
FOLDER = "step-0000000100"


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    """What is tried again is tried at once, in this process."""
    monkeypatch.setattr(ObjectBackend, "attempts", ATTEMPTS)
    monkeypatch.setattr(ObjectBackend, "first_seconds", 0.0)


@pytest.fixture
def root(tmp_path):
    """Two checkpoints of which the second has files of several parts."""
    commit(tmp_path / "root", 100, rows=80_000, metrics={"loss": 2.0})
    commit(tmp_path / "root", 200, rows=700_000)
    return tmp_path / "root"


@pytest.fixture
def place(bucket, monkeypatch):
    monkeypatch.setattr(objectput, "PART_BYTES", 5 * 2**20)  # the least that S3 takes
    return ObjectBackend(f"s3://{bucket}/runs/a")


def impatient(place, failure, attempts):
    """The same place; where the server is silent, it is not waited for long: only then, as this host may be busy."""
    seconds = 0.5 if failure == "hang" else 60
    config = {"connect_timeout": 10, "read_timeout": seconds, "retries": {"total_max_attempts": 1}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_store, "_FOR_S3", {"config_kwargs": config})
        found = ObjectBackend(place.url)
    found.attempts = attempts
    return found


def upload(root, place, step=100, **means):
    return copy_checkpoint(Catalog(root).entry(step), place, CopyOptions(**means))


def download(place, root, **means):
    return [copy_checkpoint(each, LocalBackend(root), CopyOptions(**means), source=place) for each in place.look()]


@pytest.mark.slow
def test_there_and_back_is_the_same(root, place, proxy, tmp_path):
    (root / FOLDER / "pinned.json").write_text('{"why": "Table 2"}')
    for step in (100, 200):
        copied = upload(root, place, step)
        assert not copied.already
        assert copied.written_bytes == copied.bytes
    names = [request.path.partition("?")[0].rpartition("/")[2] for request in proxy.seen if request.method == "PUT"]
    assert names[-1] == "manifest.json"
    assert any(request.puts_part for request in proxy.seen)
    proxy.seen.clear()
    entries = place.look()
    assert [entry.step for entry in entries] == [100, 200]
    assert all(entry.complete for entry in entries)
    assert sum(request.lists for request in proxy.seen) == 1
    assert COPYING not in entries[0].sizes
    download(place, tmp_path / "back")
    assert holds(tmp_path / "back") == holds(root)
    for step in (100, 200):
        folder = f"step-{step:010d}"
        here, there = root / folder / "manifest.json", tmp_path / "back" / folder / "manifest.json"
        assert here.read_bytes() == there.read_bytes()
        note = note_in(there.parent)
        assert note is not None
        assert note.every_byte
    assert (tmp_path / "back" / FOLDER / "pinned.json").read_text() == '{"why": "Table 2"}'


def test_what_is_there_is_not_put_again(root, place, proxy):
    upload(root, place)
    proxy.seen.clear()
    assert upload(root, place).already
    assert not [request for request in proxy.seen if request.method in ("PUT", "POST", "DELETE")]


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["503", "500", "reset", "cut", "hang"])
def test_a_store_that_is_busy_or_silent_for_a_while_is_asked_again(failure, root, place, proxy, tmp_path):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    failed = set()

    def fail(request):
        # No request fails twice: then none fails too often.
        key = f"{request.method} {request.path}"
        if key in failed or dice.random() < 0.5:
            return None
        failed.add(key)
        return failure

    proxy.fail = fail
    place = impatient(place, failure, 8)
    upload(root, place, 200)
    assert [entry.step for entry in place.look()] == [200]
    download(place, tmp_path / "back")
    assert failed
    assert holds(tmp_path / "back")[200] == holds(root)[200]


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["503", "500", "reset", "hang", "403"])
def test_what_cannot_be_listed_is_never_no_checkpoints(failure, root, place, proxy):
    upload(root, place)
    proxy.always(failure)
    place = impatient(place, failure, 2)
    with pytest.raises(RootError, match=r"could not be listed.*That says nothing of what is there"):
        place.look()
    with pytest.raises(RootError):
        upload(root, place)
    proxy.always(failure, lambda request: not request.lists)
    with pytest.raises(RootError, match=r"manifest\.json could not be read"):
        place.look()


def test_a_second_page_that_fails_is_no_shorter_list(root, place, proxy, monkeypatch):
    upload(root, place, 100)
    upload(root, place, 200)
    original = place.fs.call_s3

    async def few(method, *arguments, **named):
        named |= {"MaxKeys": 5} if method == "list_objects_v2" else {}
        return await type(place.fs)._call_s3(place.fs, method, *arguments, **named)

    monkeypatch.setattr(place.fs, "_call_s3", few)
    proxy.seen.clear()
    assert [entry.step for entry in place.look()] == [100, 200]
    assert sum(request.lists for request in proxy.seen) == 4
    proxy.always("503", lambda request: request.lists and "continuation-token" in request.path)
    with pytest.raises(RootError):
        place.look()
    assert original


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["503", "reset", "hang"])
@pytest.mark.parametrize("method", ["PUT", "POST", "GET"])
def test_a_store_that_stays_away_leaves_nothing_that_counts(failure, method, root, place, proxy):
    upload(root, place, 100)
    away = impatient(place, failure, 2)
    proxy.always(failure, lambda request: request.method == method and not request.lists and "00200" in request.path)
    with pytest.raises(RootError):
        upload(root, away, 200)
    proxy.fail = lambda request: None
    assert [entry.step for entry in place.look() if entry.complete] == [100]
    copied = upload(root, place, 200)
    assert not copied.already
    assert [entry.step for entry in place.look() if entry.complete] == [100, 200]


@pytest.mark.slow
def test_an_interrupted_copy_goes_on_with_what_is_missing_or_wrong(root, place, proxy):
    proxy.always("503", lambda request: request.method == "PUT" and request.path.endswith("manifest.json"))
    with pytest.raises(RootError):
        upload(root, place, 200)
    proxy.fail = lambda request: None
    place.write("step-0000000200/__1_0.distcp", bytes(5_600_000))
    place.write("step-0000000200/junk", b"junk")
    copied = upload(root, place, 200)
    assert copied.written_bytes == 5_600_000
    (entry,) = place.look()
    assert entry.complete
    assert "junk" not in entry.sizes


@pytest.mark.slow
@pytest.mark.parametrize("at", ["__1_0.distcp", "manifest.json"])
def test_a_copy_that_is_killed_goes_on_when_it_is_run_again(at, root, place, proxy, capsys):
    reached = threading.Event()

    def fail(request):
        if request.method not in ("PUT", "POST") or at not in request.path:
            return None
        reached.set()
        return "hang"

    proxy.fail = fail
    command = [sys.executable, "-m", "ckptman", "copy", str(root), place.url]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        assert reached.wait(60)
        child.kill()
    proxy.fail = lambda request: None
    assert not [entry for entry in place.look() if entry.complete]
    assert main(["copy", str(root), place.url, "--json"]) == 0
    (copied,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert copied["written_bytes"] < copied["bytes"]
    assert copied["written_bytes"] == 0 or at != "manifest.json"
    assert [entry.complete for entry in place.look()] == [True]


def test_a_store_that_gives_back_other_bytes_is_found_out(root, place, proxy):
    read = place.read
    place.read = lambda name, offset, size: bytes(size) if name.endswith("__1_0.distcp") else read(name, offset, size)
    with pytest.raises(RootError, match="does not give back what was written"):
        upload(root, place)
    del place.read
    assert not [entry for entry in place.look() if entry.complete]


def test_a_damaged_source_leaves_nothing_behind(root, place):
    flip_byte(root / FOLDER / "__1_0.distcp")
    with pytest.raises(CorruptError, match=r"__1_0.distcp is not what was saved: block \d+"):
        upload(root, place)
    assert place.listing() == {}


def test_damaged_objects_are_not_copied_back(root, place, tmp_path):
    upload(root, place)
    data = bytearray(place.read(f"{FOLDER}/__0_0.distcp", 0, 640_000))
    data[1000] ^= 1
    place.write(f"{FOLDER}/__0_0.distcp", bytes(data))
    with pytest.raises(CorruptError, match=r"__0_0\.distcp is not what was saved"):
        download(place, tmp_path / "back")
    assert Catalog(tmp_path / "back").scan() == []
    assert Catalog(tmp_path / "back").leftovers() == []


def test_another_checkpoint_of_the_same_step_is_not_replaced_unless_asked(root, place, tmp_path):
    upload(root, place)
    commit(tmp_path / "other", 100, rows=80_004)
    with pytest.raises(ExistsError, match="--overwrite"):
        upload(tmp_path / "other", place)
    upload(tmp_path / "other", place, overwrite=True)
    download(place, tmp_path / "back")
    assert holds(tmp_path / "back") == holds(tmp_path / "other")


@pytest.mark.slow
def test_objects_of_another_copy_that_was_begun_are_not_mixed(root, place, proxy, tmp_path):
    proxy.always("503", lambda request: request.method == "PUT" and request.path.endswith("manifest.json"))
    with pytest.raises(RootError):
        upload(root, place)
    proxy.fail = lambda request: None
    commit(tmp_path / "other", 100, rows=80_004)
    with pytest.raises(ExistsError, match="objects of another checkpoint"):
        upload(tmp_path / "other", place)
    upload(root, place)
    assert [entry.complete for entry in place.look()] == [True]


def test_what_is_not_complete_says_why(root, place, tmp_path):
    upload(root, place)
    shutil.copytree(root / FOLDER, tmp_path / "root" / "step-0000000300")
    for name, data in (
        ("step-0000000300/__0_0.distcp", b""),
        ("step-0000000400/manifest.json", b"{"),
        ("step-0000000500/manifest.json", (root / FOLDER / "manifest.json").read_bytes()),
        ("step-0000000600/manifest.json", b'{"format_version": 99}'),
        ("step-0000000700.tmp-x/manifest.json", b""),
        ("step-7/manifest.json", b""),
        ("notes.txt", b""),
    ):
        place.write(name, data)
    place.remove(f"{FOLDER}/__0_0.distcp")
    problems = {entry.step: entry.problem for entry in place.look()}
    assert problems[300] == "it has no manifest.json"
    assert "is not JSON" in (problems[400] or "")
    assert problems[500] == "its manifest is of step 100"
    assert "newer than this ckptman" in (problems[600] or "")
    assert problems[100] == "__0_0.distcp is missing"
    assert len(problems) == 5
    newer = next(entry for entry in place.look() if entry.step == 600)
    with pytest.raises(FormatVersionError):
        newer.require_manifest()


def test_a_manifest_that_lies_about_names_is_refused(root, place):
    upload(root, place)
    rewrite(root / FOLDER, files={"../../etc/passwd": {"bytes": 1, "digest": "0" * 32}})
    place.write(f"{FOLDER}/manifest.json", (root / FOLDER / "manifest.json").read_bytes())
    (entry,) = place.look()
    assert "not a plain file name" in (entry.problem or "")


def test_nothing_there_and_no_such_bucket_are_not_found(place, bucket, proxy):
    with pytest.raises(NotFoundError, match="there is nothing under"):
        place.look()
    with pytest.raises(NotFoundError):
        ObjectBackend("s3://no-such-bucket-anywhere/x").look()


@pytest.mark.parametrize("url", ["s3://", "s3:///x", "nosuch://bucket/x"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ConfigError):
        ObjectBackend(url)


@pytest.mark.parametrize(
    ("written", "url"),
    [
        ("s3://bucket/a/", "s3://bucket/a"),
        ("s3:/bucket/a", "s3://bucket/a"),
        ("gs://bucket", "gs://bucket"),
        ("run/checkpoints", None),
        ("/run", None),
        ("./s3:/x", None),
        ("C:/x", None),
        ("a:b", None),
    ],
)
def test_an_address_is_told_from_a_path(written, url):
    assert find_url(written) == url


def test_other_stores_of_fsspec_work_too(root, tmp_path):
    place = ObjectBackend("memory://tests/runs")
    place.fs.store.clear()
    for step in (100, 200):
        upload(root, place, step)
    assert [entry.complete for entry in place.look()] == [True, True]
    download(place, tmp_path / "back")
    assert holds(tmp_path / "back") == holds(root)


@pytest.mark.parametrize("threads", [None, 1, 3])
def test_a_store_without_parts_gets_large_files_from_front_to_back(threads, root, tmp_path, monkeypatch):
    monkeypatch.setattr(objectput, "PART_BYTES", 2**20)
    place = ObjectBackend(f"memory://{tmp_path.name}/runs")
    upload(root, place, 200, threads=threads)
    download(place, tmp_path / "back")
    assert holds(tmp_path / "back")[200] == holds(root)[200]


def test_what_ends_in_the_middle_makes_no_object_there(root, tmp_path, monkeypatch):
    monkeypatch.setattr(objectput, "PART_BYTES", 2**20)
    place = ObjectBackend(f"memory://{tmp_path.name}/runs")
    flip_byte(root / "step-0000000200" / "__1_0.distcp")
    with pytest.raises(CorruptError):
        upload(root, place, 200)
    assert [entry.complete for entry in place.list()] == []
    assert not place.listing("step-0000000200")


def test_the_meter_sees_every_byte_once(root, place):
    seen = []
    upload(root, place, 200, meter=Meter(lambda meter: seen.append((meter.phase, meter.done_bytes, meter.total_bytes))))
    for phase in ("copying", "verifying"):
        done = [count for name, count, _ in seen if name == phase]
        total = {total for name, _, total in seen if name == phase}
        assert max(done) == total.pop()


@pytest.mark.parametrize("verb", ["list", "copy"])
def test_a_store_that_is_down_is_told_with_10(verb, root, bucket, proxy, monkeypatch, capsys):
    assert main(["copy", str(root), f"s3://{bucket}/runs/c"]) == 0
    proxy.always("503")
    assert main([verb, f"s3://{bucket}/runs/c", *["back"] * (verb == "copy")]) == 10
    told = capsys.readouterr()
    assert "could not be listed 4 times" in told.err
    assert "no complete checkpoint" not in told.out + told.err


@pytest.mark.slow
def test_the_command_copies_there_lists_and_copies_back(root, bucket, tmp_path, capsys):
    url = f"s3://{bucket}/runs/b"
    assert main(["copy", str(root), url, "--all"]) == 0
    assert f"Copied 2 checkpoints, 11.9 MiB, to {url}." in capsys.readouterr().out
    assert main(["list", url]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in told[1:3]] == ["100", "200"]
    assert told[-1] == "2 complete checkpoints, 11.9 MiB; the newest is of step 200."
    assert main(["list", url, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [each["path"] for each in listed] == [f"{url}/{FOLDER}", f"{url}/step-0000000200"]
    assert main(["list", f"{url}/nothing"]) == 3
    assert main(["copy", url, str(tmp_path / "one")]) == 0
    assert sorted(holds(tmp_path / "one")) == [200]
    assert main(["copy", f"{url}/{FOLDER}", str(tmp_path / "one")]) == 0
    assert holds(tmp_path / "one") == holds(root)
    capsys.readouterr()
    assert main(["copy", url, str(tmp_path / "one"), "--all", "--json"]) == 0
    assert [each["already"] for each in json.loads(capsys.readouterr().out)["checkpoints"]] == [True, True]
    assert main(["copy", url, str(tmp_path / "two"), "--step", "7"]) == 3
    assert "has no checkpoint of step 7; the latest there are: 100, 200" in capsys.readouterr().err
    assert main(["copy", str(root), "s3://no-such-bucket-anywhere/x", "--all"]) == 3
    assert main(["copy", url, "s3://elsewhere/x"]) == 2
    assert main(["copy", str(root), f"{url}/{FOLDER}"]) == 2


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """A store without parts, for which the files of step 200 are large."""
    monkeypatch.setattr(objectput, "PART_BYTES", 2**20)
    return ObjectBackend(f"memory://{tmp_path.name}/runs")


def test_one_write_that_fails_is_tried_again_on_a_store_without_parts(root, memory, tmp_path, monkeypatch):
    opened, failed = memory.fs.open, list[str]()

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

    monkeypatch.setattr(memory.fs, "open", flaky)
    seen = []
    copied = upload(root, memory, 200, meter=Meter(lambda meter: seen.append(meter.done_bytes)))
    assert failed
    assert copied.written_bytes == copied.bytes >= max(seen)
    download(memory, tmp_path / "back")
    assert holds(tmp_path / "back")[200] == holds(root)[200]


def test_another_copy_that_ends_this_very_moment_is_left_alone(root, memory, tmp_path, monkeypatch):
    tidy = objectput.ObjectDraft.tidy

    def late(draft):
        monkeypatch.setattr(objectput.ObjectDraft, "tidy", tidy)
        assert not upload(root, memory, 200).already
        return tidy(draft)

    monkeypatch.setattr(objectput.ObjectDraft, "tidy", late)
    upload(root, memory, 200)
    assert [entry.complete for entry in memory.list()] == [True]
    download(memory, tmp_path / "back")
    assert holds(tmp_path / "back")[200] == holds(root)[200]


def test_objects_whose_manifest_cannot_be_read_may_be_of_anybody(root, memory):
    upload(root, memory, 200)
    memory.write("step-0000000200/pinned.json", b'{"why": "Table 2"}')
    memory.write("step-0000000200/manifest.json", b'{"step": 200')
    assert [entry.may_go for entry in memory.list()] == [False]

"""Copies to an S3 server and back, while it is busy, silent or away: never a lie, and never "no checkpoints"."""

import itertools
import json
import random
import subprocess
import sys
import threading

import pytest

from ckptman.cli.app import main
from ckptman.errors import RootError
from ckptman.storage.catalog.backends import object_draft, object_store
from ckptman.storage.catalog.backends.object_store import COPYING, ObjectBackend
from tests.helpers.checkpoints import commit
from tests.helpers.copies import copy, copy_back
from tests.helpers.faulty_disk import drawn, holds
from tests.helpers.object_store import bucket_fixture, proxy_fixture

__all__ = ["bucket_fixture", "proxy_fixture"]

FOLDER = "step-0000000100"
FAILURES = ["503", "500", "reset", "cut", "hang"]


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    """What is tried again is tried at once, in this process."""
    monkeypatch.setattr(ObjectBackend, "attempts", 4)
    monkeypatch.setattr(ObjectBackend, "first_seconds", 0.0)
    monkeypatch.setattr(object_store, "_FOR_S3", {"config_kwargs": {"retries": {"total_max_attempts": 1}}})


@pytest.fixture
def root(tmp_path):
    """Two checkpoints of which the second has a file of two parts."""
    commit(tmp_path / "root", 100, rows=80_000)
    commit(tmp_path / "root", 200, ranks=1, rows=340_000)
    return tmp_path / "root"


@pytest.fixture
def place(bucket, monkeypatch):
    monkeypatch.setattr(object_draft, "PART_BYTES", 5 * 2**20)  # the least that S3 takes
    return ObjectBackend(f"s3://{bucket}/runs/a")


def impatient(place, failure, attempts):
    """The same place; where the server is silent, it is not waited for long: only then, as this host may be busy."""
    seconds = 0.5 if failure == "hang" else 60
    config = {"read_timeout": seconds, "retries": {"mode": "standard", "total_max_attempts": 3}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_store, "_FOR_S3", {"config_kwargs": config})
        found = ObjectBackend(place.url)
    found.attempts = attempts
    return found


def test_the_manifest_is_put_last_and_what_is_there_is_not_put_again(root, place, proxy):
    for step in (100, 200):
        proxy.seen.clear()
        copy(root, place, step)
        puts = [request.path.partition("?")[0].rpartition("/")[2] for request in proxy.seen if request.method == "PUT"]
        assert puts[-1] == "manifest.json"
    assert any(request.puts_part for request in proxy.seen)
    proxy.seen.clear()
    entries = place.look()
    assert [(entry.step, entry.complete, COPYING in entry.sizes) for entry in entries] == [
        (100, True, False),
        (200, True, False),
    ]
    assert sum(request.lists for request in proxy.seen) == 1
    assert copy(root, place, 100).already
    assert not [request for request in proxy.seen if request.method in ("PUT", "POST", "DELETE")]


@pytest.mark.slow
@pytest.mark.parametrize("failure", FAILURES)
def test_a_store_that_is_busy_or_silent_for_a_while_is_asked_again(failure, root, place, proxy, tmp_path):
    print(f"seed {(seed := random.randrange(2**32))}")
    dice, failed = random.Random(seed), set()

    def fail(request):
        # No request fails twice: then none fails too often.
        key = f"{request.method} {request.path}"
        if key in failed or dice.random() < 0.5:
            return None
        failed.add(key)
        return failure

    proxy.fail = fail
    place = impatient(place, failure, 8)
    copy(root, place)
    assert [entry.step for entry in place.look()] == [200]
    copy_back(place, tmp_path / "back")
    assert failed
    assert holds(tmp_path / "back")[200] == holds(root)[200]


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["503", "500", "reset", "hang", "403"])
def test_what_cannot_be_listed_is_never_no_checkpoints(failure, root, place, proxy):
    copy(root, place, 100)
    proxy.always(failure)
    place = impatient(place, failure, 2)
    with pytest.raises(RootError, match=r"could not be listed.*That says nothing of what is there"):
        place.look()
    with pytest.raises(RootError):
        copy(root, place, 100)
    proxy.always(failure, lambda request: not request.lists)
    with pytest.raises(RootError, match=r"manifest\.json could not be read"):
        place.look()


def test_a_second_page_that_fails_is_no_shorter_list(root, place, proxy, monkeypatch):
    for step in (100, 200):
        copy(root, place, step)

    async def few(method, *arguments, **named):
        named |= {"MaxKeys": 5} if method == "list_objects_v2" else {}
        return await type(place.fs)._call_s3(place.fs, method, *arguments, **named)

    monkeypatch.setattr(place.fs, "_call_s3", few)
    proxy.seen.clear()
    assert [entry.step for entry in place.look()] == [100, 200]
    assert sum(request.lists for request in proxy.seen) == 3
    proxy.always("503", lambda request: request.lists and "continuation-token" in request.path)
    with pytest.raises(RootError):
        place.look()


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(9, marks=[pytest.mark.campaign, pytest.mark.timeout(600)])])
def test_a_store_that_stays_away_leaves_nothing_that_counts(count, root, place, proxy):
    for failure, method in drawn([*itertools.product(("503", "reset", "hang"), ("PUT", "POST", "GET"))], count):
        place = ObjectBackend(f"{place.url}/{method}-{failure}")
        copy(root, place, 100)
        away = impatient(place, failure, 2)
        proxy.always(failure, lambda each, method=method: each.method == method and "00200/" in each.path)
        with pytest.raises(RootError):
            copy(root, away)
        proxy.fail = lambda request: None
        assert [entry.step for entry in place.look() if entry.complete] == [100]
        assert not copy(root, place).already
        assert [entry.step for entry in place.look() if entry.complete] == [100, 200]


@pytest.mark.slow
@pytest.mark.parametrize("at", ["__0_0.distcp", "manifest.json"])
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


@pytest.mark.parametrize("verb", ["list", "copy"])
def test_a_store_that_is_down_is_told_with_10(verb, root, bucket, proxy, capsys):
    proxy.always("503")
    assert main([verb, f"s3://{bucket}/runs/c", *["back"] * (verb == "copy")]) == 10
    told = capsys.readouterr()
    assert "could not be listed 4 times" in told.err
    assert "no complete checkpoint" not in told.out + told.err


def test_the_command_copies_there_lists_and_copies_back(root, tmp_path, capsys):
    url = f"memory://{tmp_path.name}/runs/b"
    assert main(["copy", str(root), url, "--all"]) == 0
    assert f"Copied 2 checkpoints, 6.4 MiB, to {url}." in capsys.readouterr().out
    assert main(["list", url]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in told[1:3]] == ["100", "200"]
    assert told[-1] == "2 complete checkpoints, 6.4 MiB; the newest is of step 200."
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
    assert main(["copy", url, "memory://elsewhere/x"]) == 2
    assert main(["copy", str(root), f"{url}/{FOLDER}"]) == 2

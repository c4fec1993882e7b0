"""The files beside checkpoints, as they were when format 1 was frozen: read, and written again byte for byte."""

import json
import os
import shutil

import pytest

from ckptman.runtime.outcome import read_outcome, write_outcome
from ckptman.storage.catalog import tiers
from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.catalog.liveness import Owner
from ckptman.storage.catalog.pins import pin, read_pin
from ckptman.storage.catalog.prune import read_policy, write_policy
from ckptman.storage.catalog.rollback_records import parse_rollback_file
from ckptman.storage.format.paths import ROOT_ID
from ckptman.storage.format.sealed_json import seal, unseal


def rewrite_retention(path):
    policy = read_policy(path.parent.parent)
    path.unlink()
    write_policy(path.parent.parent, policy)


def rewrite_rollback(path):
    path.write_bytes(parse_rollback_file(path, path.read_bytes()).to_json())


def rewrite_tiers(path):
    found = tiers.read_tiers(path.parent.parent)
    assert [(str(each), each.every) for each in found] == [("/tmp/golden/tier", 2)]
    tiers.write_tiers(path.parent.parent, found)


def rewrite_root(path):
    place = LocalBackend(path.parent.parent)
    path.write_bytes(tiers._read_mark(place, ROOT_ID).to_json())


def rewrite_outcome(path):
    write_outcome(path, read_outcome(path))


def rewrite_owner(path):
    line, rest = path.read_bytes().split(b"\n", 1)
    path.write_bytes(Owner.model_validate_json(line).model_dump_json().encode() + b"\n" + rest)


def rewrite_pin(path):
    note = read_pin(path.parent)
    pin(path.parent, note.why, by=note.by, time_seconds=note.time_seconds)


FILES = {
    ".ckptman/retention.json": rewrite_retention,
    ".ckptman/rollback-000001.json": rewrite_rollback,
    ".ckptman/rollback-000002.json": rewrite_rollback,
    ".ckptman/root.json": rewrite_root,
    ".ckptman/outcome.json": rewrite_outcome,
    ".ckptman/owner-000004.json": rewrite_owner,
    ".ckptman/tiers.json": rewrite_tiers,
    "step-0000000001/pinned.json": rewrite_pin,
}


GROWN = ("retention", "rollback")
"""What has more fields, or another order of them, by now: the values of the fields that it had are the same."""


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_read_and_written_again_byte_for_byte(golden, tmp_path, name):
    root = tmp_path / "run"
    shutil.copytree(golden / "run", root)
    before = (root / name).read_bytes()
    FILES[name](root / name)
    after = (root / name).read_bytes()
    if any(each in name for each in GROWN):
        old, new = ({**json.loads(data), "digest": ""} for data in (before, after))
        assert {key: new[key] for key in old} == old
    else:
        assert after == before


def test_what_the_tiers_held_is_read(golden):
    held = tiers.read_drained(golden / "run")
    assert [(each.step, each.sequence, bool(each.abandoned)) for each in held["/tmp/golden/tier"]] == [
        *((2, 2, False), (4, 4, True), (4, 6, False))
    ]


def test_a_seal_is_the_same_in_every_version(golden):
    """Any change of a byte is found; what is inside is plain JSON."""
    for path in (golden / "run").rglob("*.json"):
        data = path.read_bytes()
        if b'"digest": "' not in data[-60:] or path.name == "manifest.json":
            continue
        inner = unseal(path, data)
        assert "digest" not in json.loads(inner)
        assert seal(inner) == data, os.fspath(path)

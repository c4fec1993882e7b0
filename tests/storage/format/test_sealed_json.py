"""The digest of what lies beside a manifest: a byte that has changed is noticed, what has no digest is read as ever."""

import json

import pytest

from ckptman.errors import ConfigError, CorruptError
from ckptman.policies.retention_plan import KeepLast
from ckptman.policies.tiers import Tier
from ckptman.runtime.outcome import highest_attempt
from ckptman.storage.catalog.pins import PINNED, pin, read_pin
from ckptman.storage.catalog.prune import read_policy, write_policy
from ckptman.storage.catalog.rollback import execute, plan_rollback
from ckptman.storage.catalog.rollback_records import read_rollbacks
from ckptman.storage.catalog.tiers import read_drained, read_tiers, write_drained, write_tiers
from ckptman.storage.catalog.verified import VERIFIED, read_verified, remember_damage
from ckptman.storage.format.paths import retention_path, rollback_path, tiers_path
from ckptman.storage.format.sealed_json import SealError, seal, unseal
from tests.helpers.checkpoints import commit


def change(path, old, new):
    """What a flipped bit does: the file is still JSON, and says something else."""
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))


def without_digest(path):
    """As an earlier version wrote it."""
    values = json.loads(path.read_bytes())
    del values["digest"]
    path.write_text(json.dumps(values))


@pytest.mark.parametrize("text", [b'{"a": 1}', b'{\n "a": {"b": {}}\n}\n', b'{"a": "\\"digest\\""}'])
def test_what_was_sealed_is_what_is_unsealed(text):
    sealed = seal(text)
    assert json.loads(unseal("x", sealed)) == json.loads(text)
    assert json.loads(sealed).keys() == {"a", "digest"}
    assert unseal("x", text) == text
    for at in range(sealed.rindex(b',\n "digest"')):
        with pytest.raises(SealError, match="x does not match its digest"):
            unseal("x", sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :])


def test_a_pin_that_has_changed_pins(tmp_path):
    folder = commit(tmp_path, 10).path
    pin(folder, "Table 2", by="me", time_seconds=1.0)
    change(folder / PINNED, b"Table 2", b"Table 3")
    assert "cannot be read" in read_pin(folder).why
    change(folder / PINNED, b"Table 3", b"Table 2")
    without_digest(folder / PINNED)
    assert read_pin(folder).why == "Table 2"


def test_a_note_that_has_changed_says_nothing(tmp_path):
    entry = commit(tmp_path, 10)
    remember_damage(entry.path, entry.require_manifest(), "block 7")
    change(entry.path / VERIFIED, b"block 7", b"block 6")
    with pytest.warns(RuntimeWarning, match="is passed over, because its bytes have changed: ckptman verify"):
        assert read_verified(entry.path, entry.require_manifest()) is None
    change(entry.path / VERIFIED, b"block 6", b"block 7")
    without_digest(entry.path / VERIFIED)
    assert read_verified(entry.path, entry.require_manifest()).damaged == "block 7"


def test_a_rollback_that_has_changed_is_an_error(tmp_path):
    for step in (10, 20):
        commit(tmp_path, step)
    execute(
        tmp_path, lambda: plan_rollback(tmp_path, 10), why="loss", by="me", time_seconds=1.0, highest=highest_attempt
    )
    path = rollback_path(tmp_path, 1)
    change(path, b'"sequence": 2' if b'"sequence": 2' in path.read_bytes() else b'"sequence":2', b'"sequence":3')
    with pytest.raises(CorruptError, match="nobody can tell which checkpoints were abandoned"):
        read_rollbacks(tmp_path)
    without_digest(path)
    assert list(read_rollbacks(tmp_path)) == [1]


def test_rules_and_tiers_that_have_changed_are_errors(tmp_path):
    (tmp_path / "run" / ".ckptman").mkdir(parents=True)
    root = tmp_path / "run"
    write_policy(root, KeepLast(30))
    change(retention_path(root), b"30", b"10")
    with pytest.raises(ConfigError, match="does not match its digest"):
        read_policy(root)
    without_digest(retention_path(root))
    assert read_policy(root) == KeepLast(10)
    write_tiers(root, [Tier(tmp_path / "far", every=4)])
    change(tiers_path(root), b"far", b"fas")
    with pytest.raises(CorruptError, match="start the run again"):
        read_tiers(root)
    without_digest(tiers_path(root))
    assert [str(each) for each in read_tiers(root)] == [str(tmp_path / "fas")]
    write_drained(root, {"a": []})
    assert read_drained(root) == {"a": []}
    change(root / ".ckptman" / "drained.json", b'"a"', b'"b"')
    assert read_drained(root) == {}

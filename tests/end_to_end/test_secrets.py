"""Nothing secret is written where others read it: what looks like one is masked, and no address may hold any."""

import json

import pytest

import ckptman
from ckptman.cli.app import main
from ckptman.errors import ConfigError, RootError, masked
from ckptman.runtime.journal import Journal
from ckptman.storage.catalog.backends.backend import find_url
from ckptman.storage.catalog.backends.object_store import ObjectBackend
from ckptman.storage.catalog.tiers import write_tiers
from ckptman.storage.format.paths import journal_path, outcome_path, tiers_path
from tests.helpers.checkpoints import commit


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("s3://user:hunter2@bucket/run is away", "hunter2"),
        ("s3:/user:hunter2@bucket/run", "hunter2"),
        ("s3://AK:hun/ter@2@bucket/run", "ter@2"),
        ("https://hunter2@host/x", "hunter2"),
        ("403 for https://b.s3/x?X-Amz-Signature=hunter2&y=1", "hunter2"),
        ("HF_TOKEN=hunter2", "hunter2"),
        ("AWS_SECRET_ACCESS_KEY='hunter2'", "hunter2"),
        ("{'api_key': 'hunter2', 'x': 1}", "hunter2"),
        ("{'Authorization': 'Bearer hunter2 and more'}", "hunter2"),
        ("Authorization: Basic hunter2", "hunter2"),
        ("sent Bearer hunter2hunter2", "hunter2"),
        ("password: hunter2", "hunter2"),
        ("of AKIAIOSFODNN7EXAMPLE", "IOSFODNN7EXAMPLE"),
        ("login with hf_abcdefghijklmnopqrst failed", "abcdefghij"),
        ("GET /run?key=hunter2hunter2", "hunter2"),
        ("s3:///user:hunter2@bucket", "hunter2"),
        ("s3:user:hunter2@bucket", "hunter2"),
        ("PASSWORD='hunter two three'", "three"),
        ("aws_session_token: IQoJb3JpZ2luX2VjEB4a", "IQoJb3"),
        ("npm_abcdefghijklmnopqrstuvwxyz012345", "uvwxyz"),
        ("jwt eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl", "c2lnbm"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----", "MIIEow"),
    ],
)
def test_what_looks_like_a_secret_is_masked(text, secret):
    assert secret not in masked(text)
    assert "***" in masked(text)
    assert masked(masked(text)) == masked(text)


@pytest.mark.parametrize(
    "text",
    [
        "KeyError: 'model.weight'",
        "no token: step 4 of 10",
        "tokens=4000 lr=0.1 design=3",
        "unknown key 'loss'; known keys: a, b",
        "http://127.0.0.1:8080/a@b is away",
        "abfs://container@account.dfs.core.windows.net/run",
        "/data/run/step-0000000010: signature mismatch",
        "missing key='optimizer.state.0.exp_avg'",
        "token=50257 is out of range",
        "a worker was killed by sig=SIGSEGV",
        "signature=(Tensor, int)",
        "/scratch/hf_transformers_pretraining_run/sk-learn-experiments-2024/ckpt",
    ],
)
def test_what_is_none_stays(text):
    assert masked(text) == text


def test_journal_and_outcome_hold_no_secret_of_an_error(tmp_path):
    state = {"count": {"n": 0}}
    text = "401 from https://user:hunter2@hub/x, sent {'Authorization': 'Bearer hunter2'}"

    def crash():
        with ckptman.Checkpointer(tmp_path / "run", state, deadline=None):
            raise RuntimeError(text)

    with pytest.raises(RuntimeError, match="hunter2"):
        crash()
    for path in (journal_path(tmp_path / "run"), outcome_path(tmp_path / "run")):
        assert "RuntimeError: 401 from https://***@hub/x" in path.read_text()
        assert "hunter2" not in path.read_text()


def test_a_journal_masks_whatever_it_is_given(tmp_path):
    journal = Journal(tmp_path / "j")
    journal.record("x", cause=OSError("HF_TOKEN=hunter2"), more=[{"a": "password: hunter2"}])
    journal.close()
    assert json.loads((tmp_path / "j").read_text())["more"] == [{"a": "password: ***"}]
    assert "hunter2" not in (tmp_path / "j").read_text()


SECRET_URL = "s3://user:hunter2@bucket/run"


@pytest.mark.parametrize("verb", ["list", "verify", "copy", "copy-to", "drain", "export", "show"])
@pytest.mark.parametrize("url", [SECRET_URL, "S3://user:hunter2@bucket/run", "s3://bucket/run?token=hunter2"])
def test_no_address_with_a_secret_is_taken_or_shown(verb, url, tmp_path, capsys):
    commit(tmp_path / "run", 10)
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    words = {"copy": ["copy", url, out], "copy-to": ["copy", run, url], "drain": ["drain", run, "--to", url]}
    arguments = words.get(verb, [verb, url, *([out] if verb == "export" else [])])
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert "hunter2" not in told.out + told.err
    assert "has a secret in it" in told.err


def test_nor_is_one_a_tier():
    with pytest.raises(ConfigError, match=r"s3://\*\*\*@bucket/run has a secret in it.*credentials in the environment"):
        ckptman.Tier(SECRET_URL)


@pytest.mark.parametrize("url", ["s3://bucket/hf_transformers_pretraining/sk-learn-2024", "s3://b/key=a/token=gpt2/x"])
def test_words_in_an_address_are_no_secrets(url):
    assert find_url(url) == url


def test_saves_go_to_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for save in (lambda: ckptman.save({}, "s3://bucket/x"), lambda: ckptman.Checkpointer("s3://bucket/x", {"a": 1})):
        with pytest.raises(ConfigError, match="s3://bucket/x is an object store, and saves go to a folder"):
            save()
    assert not list(tmp_path.iterdir())


def test_one_that_was_stored_is_not_shown(tmp_path, capsys):
    commit(tmp_path / "run", 10)
    write_tiers(tmp_path / "run", [ckptman.Tier("s3://bucket/run")])
    stored = json.loads(tiers_path(tmp_path / "run").read_text())
    del stored["digest"]
    tiers_path(tmp_path / "run").write_text(json.dumps(stored).replace("s3://", "s3://user:hunter2@"))
    assert main(["drain", str(tmp_path / "run")]) == 4
    assert main(["prune", str(tmp_path / "run"), "--keep-last", "1"]) == 4
    told = capsys.readouterr()
    assert "hunter2" not in told.out + told.err


def test_what_a_store_says_is_masked(monkeypatch):
    place = ObjectBackend("memory://bucket/run")
    place.attempts = 1

    def fail(*_, **__):
        raise RuntimeError("403: https://b/x?X-Amz-Signature=hunter2")

    monkeypatch.setattr(place.fs, "find", fail)
    with pytest.raises(RootError, match="Signature=\\*\\*\\*"):
        place.listing()

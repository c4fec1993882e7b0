"""The configuration: everything wrong is found in one place, before anything is started."""

import subprocess
import sys
from pathlib import Path

import pytest

from ckptman.errors import ConfigError, NotFoundError, UnknownKeyError
from ckptman.policies.retention_plan import KeepBest, KeepEvery, KeepLast
from ckptman.policies.save_policies import BeforeDeadline, EverySteps, InitTimeInterval, OnStop
from ckptman.train.__main__ import main
from ckptman.train.config import Config, check_config, load_config

EXAMPLE = Path(__file__).parents[2] / "examples" / "run.toml"


def document(**sections):
    whole = {"data": {"path": "tokens"}, "run": {"steps": 200}, "checkpoint": {"root": "checkpoints"}}
    for name, values in sections.items():
        whole[name] = whole.get(name, {}) | (values or {})
    return {name: values for name, values in whole.items() if sections.get(name, values) is not None}


def test_the_example_is_valid_and_shows_every_key_with_its_default():
    text = EXAMPLE.read_text()
    load_config(EXAMPLE)
    uncommented = "\n".join(line.removeprefix("# ") if " = " in line else line for line in text.splitlines())
    for name, section in Config.model_fields.items():
        assert f"[{name}]" in text
        for key, field in section.annotation.model_fields.items():
            line = next((line for line in uncommented.splitlines() if line.startswith(f"{key} = ")), None)
            assert line, f"{name}.{key} is not in {EXAMPLE.name}"
            was_comment = f"# {line}" in text
            if was_comment and field.default is not None:
                shown = line.partition(" = ")[2].partition("#")[0].strip().strip('"')
                assert shown == str(field.default).lower() or float(shown) == field.default, f"{name}.{key}"


@pytest.mark.parametrize(
    ("section", "key", "known"),
    [
        ({"model": {"n_layers": 3}}, "model.n_layers", {"layers", "dim", "kv_heads"}),
        ({"optimiser": {"learning_rate": 1.0}}, "optimiser", {"model", "data", "optimizer", "parallel", "run"}),
    ],
)
def test_what_is_unknown_lists_what_is_known(section, key, known):
    with pytest.raises(UnknownKeyError) as caught:
        check_config(document(**section))
    assert caught.value.key == key
    assert known <= set(caught.value.known)
    assert all(each in str(caught.value) for each in known)


def test_all_wrong_values_are_told_at_once_in_one_line_each():
    with pytest.raises(ConfigError) as caught:
        check_config(document(run={"steps": 0}, data={"global_batch": "many"}, optimizer={"learning_rate": -1.0}))
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    for name in ("run.steps", "data.global_batch", "optimizer.learning_rate"):
        assert sum(name in line for line in lines) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint": None}, "checkpoint: missing"),
        ({"model": {"dim": 100, "heads": 8}}, "not a multiple of model.heads"),
        ({"model": {"dim": 24, "heads": 8}}, "even width"),
        ({"model": {"heads": 8, "kv_heads": 3}}, "does not divide"),
        ({"checkpoint": {"min_seconds": 901.0}}, "checkpoint.max_seconds"),
        ({"checkpoint": {"every_seconds": float("nan")}}, "checkpoint.every_seconds"),
        ({"parallel": {"compute_dtype": "float16"}}, "parallel.compute_dtype"),
    ],
)
def test_values_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        check_config(document(**changes))


def test_changes_on_the_command_line_win(tmp_path):
    config = load_config(EXAMPLE, ["run.steps=7000", f"data.path={tmp_path}", "model.tied=false", "run.log='a b'"])
    assert config.run.steps == 7000
    assert config.data.path == tmp_path
    assert config.model.tied is False
    assert config.run.log == Path("a b")


@pytest.mark.parametrize("change", ["steps=3", "run.steps", "=3", "run.=3"])
def test_a_change_that_is_not_one_is_refused(change):
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        load_config(EXAMPLE, [change])


@pytest.mark.parametrize(
    ("content", "kind", "told"),
    [
        (None, NotFoundError, "--config"),
        (b"[run\n", ConfigError, "not TOML"),
        (b"\xff\xfe\0", ConfigError, "cannot read"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path, content, kind, told):
    if content is not None:
        (tmp_path / "run.toml").write_bytes(content)
    with pytest.raises(kind, match=told):
        load_config(tmp_path / "run.toml")


def test_intervals_and_keep_rules_become_policies():
    default = check_config(document()).checkpoint
    assert default.save_policy() == OnStop() | BeforeDeadline(margin_seconds=30) | InitTimeInterval(
        factor=4, min_seconds=0, max_seconds=900
    )
    assert default.retention() is None
    given = check_config(document(checkpoint={"every_steps": 5, "keep_last": 2, "keep_every": 100, "keep_best": 1}))
    assert given.checkpoint.save_policy() == OnStop() | BeforeDeadline(margin_seconds=30) | EverySteps(5)
    assert given.checkpoint.retention() == KeepLast(2) | KeepEvery(steps=100) | KeepBest("loss", count=1)


def test_an_error_is_one_message_and_an_exit_code(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["--config", str(EXAMPLE), "--set", "model.colour=3"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown key 'model.colour'")
    assert main(["--config", str(EXAMPLE), "--set", f"data.path={tmp_path}"]) == 3
    assert "python -m ckptman.train.tokenize" in capsys.readouterr().err


@pytest.mark.slow
def test_a_wrong_key_is_found_without_torch():
    code = (
        "import sys; from ckptman.train.__main__ import main; "
        f"code = main(['--config', {str(EXAMPLE)!r}, '--set', 'run.stepps=1']); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 2

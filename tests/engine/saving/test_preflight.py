"""What a load would refuse to unpickle is told at the save, and by verify; and no good checkpoint is blamed for it."""

import io
import json
import os
from datetime import date
from pathlib import PurePath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ckptman
from ckptman.cli.app import main
from ckptman.tools.verify import pickle_check, verify_process
from tests.engine.dcp.test_values import Named, save
from tests.helpers.checkpoints import note_in

pytestmark = [
    pytest.mark.usefixtures("forked"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:TypedStorage"),
]
NAMED = f"{Named.__module__}.{Named.__qualname__}"
STEP = "step-0000000001"
VALUES = torch.arange(4.0) / 8


def quantized(values, scale=0.125):
    return torch.quantize_per_tensor(values, scale, 3, torch.quint8)


def made(tensor):
    module = nn.Linear(2, 2)
    module.register_buffer("odd", tensor)
    return module


SPECIAL = {
    "class": (lambda: VALUES.as_subclass(Named), rf"odd: a {NAMED} is no tensor .*add_safe_globals"),
    "quantized": (lambda: quantized(VALUES), r"odd: a tensor that torch has quantized \(quint8\).*int_repr"),
}


@pytest.mark.parametrize("place", ["module", "dict"])
@pytest.mark.parametrize("kind", SPECIAL)
def test_a_tensor_that_no_restore_makes_is_refused_in_the_first_step(tmp_path, kind, place):
    make, told = SPECIAL[kind]
    tensor = make()
    state = {"x": made(tensor) if place == "module" else {"odd": tensor}}
    with ckptman.Checkpointer(tmp_path, state, deadline=None) as checkpointer:
        with pytest.raises(ckptman.ConfigError, match=rf"^x\.{told}"):
            checkpointer.step(1)
        state["x"] = made(VALUES) if place == "module" else {"odd": VALUES}
        checkpointer.save(1)
    assert main(["verify", str(tmp_path)]) == 0


def test_a_class_that_the_script_allows_is_saved_and_restored(tmp_path):
    """Where another script forgets to allow it, the checkpoint is neither passed over nor noted as damaged."""
    with (
        torch.serialization.safe_globals([Named]),
        ckptman.Checkpointer(tmp_path, {"m": made(VALUES.as_subclass(Named))}, deadline=None) as checkpointer,
    ):
        checkpointer.save(1)
        checkpointer.save(2)
    fresh = {"m": made(torch.zeros(4).as_subclass(Named))}
    with (
        pytest.raises(ckptman.ConfigError, match=rf"asks for {NAMED}.*add_safe_globals.*is not usable"),
        ckptman.Checkpointer(tmp_path, fresh, deadline=None) as checkpointer,
    ):
        checkpointer.restore()
    assert not list(tmp_path.glob("step-*/verified.json"))
    with (
        torch.serialization.safe_globals([Named]),
        ckptman.Checkpointer(tmp_path, fresh, deadline=None) as checkpointer,
    ):
        assert checkpointer.restore() == 2
    assert torch.equal(fresh["m"].odd, VALUES)


def test_quantized_numbers_are_never_read_by_other_scales(tmp_path):
    with pytest.warns(RuntimeWarning, match="will not be loaded: q: .*quantized"):
        ckptman.save({"q": quantized(VALUES)}, tmp_path / STEP)
    same, other = quantized(VALUES * 0), quantized(VALUES * 0, 0.5)
    ckptman.load({"q": same}, tmp_path / STEP)
    assert torch.equal(same.dequantize(), VALUES)
    with pytest.raises(ckptman.ConfigError, match=r"other scales.*not usable"):
        ckptman.load({"q": other}, tmp_path / STEP)
    for state in ({"q": other}, {"q": None}):
        with (
            pytest.raises(ckptman.ConfigError, match="scales"),
            ckptman.Checkpointer(tmp_path, state, deadline=None) as checkpointer,
        ):
            checkpointer.restore()
    assert note_in(tmp_path / STEP) is None


def test_who_saves_such_a_tensor_by_a_state_dict_is_told(tmp_path):
    state = {
        "t": VALUES.as_subclass(Named),
        "file": io.BytesIO(b"abc"),
        "path": PurePath("a"),
        "deep": {"hook": os.getcwd, "n": 1},
        "n": 2,
    }
    with pytest.warns(RuntimeWarning, match="will not be loaded") as told:
        dcp.save(state, storage_writer=ckptman.StorageWriter(tmp_path / "a"))
    texts = sorted(str(each.message) for each in told if "will not be loaded" in str(each.message))
    assert len(texts) == 3
    for text, what in zip(texts, ["t: a ", "the value deep.hook", "the value path"]):
        assert text.startswith(f"what is saved now will not be loaded: {what}")
    with pytest.warns(RuntimeWarning, match="will not be loaded: t: a "):
        ckptman.save({"t": state["t"]}, tmp_path / "b")
    with torch.serialization.safe_globals([Named]):  # warnings are errors here
        ckptman.save({"t": state["t"]}, tmp_path / "c")
        dcp.save({"t": state["t"], "n": 1}, storage_writer=ckptman.StorageWriter(tmp_path / "d"))


@pytest.fixture
def in_process(monkeypatch):
    """The check without the start of a process of its own."""

    def refused_on(path, allow):
        before = torch.serialization.get_safe_globals()
        try:
            pickle_check.allow(allow)
            refused, quantized = pickle_check.check(path)
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(before)
        return {"refused": refused, "quantized": quantized}

    monkeypatch.setattr(verify_process, "refused_on", refused_on)


STATE = {"t": VALUES.as_subclass(Named), "when": date(2026, 11, 23), "n": 1, "deep": {"by": [1, {"w": VALUES}]}}


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("writer", ["ckptman.save", "StorageWriter", "dcp"])
def test_verify_says_what_a_load_would_refuse(tmp_path, writer, capsys):
    save(STATE, tmp_path / "x", writer)
    where = str(tmp_path / "x")
    assert main(["verify", where]) == 7
    told = capsys.readouterr()
    assert "does not load\n" in told.out
    assert f"the tensor t was refused: it asks for {NAMED}" in told.out
    assert "the value when was refused: it asks for datetime.date" in told.out
    assert "holds what no load unpickles" in told.err
    assert main(["verify", where, "--allow", NAMED, "--json"]) == 7
    (report,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert not report["good"]
    assert [each.partition(" was refused")[0] for each in report["refused"]] == ["the value when"]
    assert main(["verify", where, "--allow", NAMED, "--allow", "datetime.date"]) == 0
    assert main(["verify", where, "--plan-only", "--world-size", "2"]) == 0
    for name in ("no_such.Thing", "date", "json.no"):
        assert main(["verify", where, "--allow", name]) == 2
        assert f"--allow: {name} is not there" in capsys.readouterr().err


@pytest.mark.slow
def test_what_is_allowed_is_allowed_to_the_processes_that_load(tmp_path, capsys):
    save(STATE, tmp_path / "x", "ckptman.save")
    allowed = ["--allow", NAMED, "--allow", "datetime.date"]
    assert main(["verify", str(tmp_path / "x"), "--world-size", "2", *allowed]) == 0
    assert "on 2 processes: loads" in capsys.readouterr().out


@pytest.mark.usefixtures("in_process")
def test_verify_remarks_on_quantized_tensors(tmp_path, capsys):
    with pytest.warns(RuntimeWarning, match="quantized"):
        ckptman.save({"q": quantized(VALUES), "w": VALUES}, tmp_path / "x")
    assert main(["verify", str(tmp_path / "x")]) == 0
    assert "remark: q: quantized, and loaded only into tensors of the same scales" in capsys.readouterr().out

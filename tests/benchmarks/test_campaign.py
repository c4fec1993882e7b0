"""The benchmarks as a script: what a part measured is kept whatever happens to the others, and the GPU part runs."""

import json
import sys
import time

import pytest
import torch

from benchmarks.engine import campaign, gpu
from benchmarks.engine.bars import bars
from benchmarks.engine.contestants import CKPTMAN
from benchmarks.engine.section import Plan, Section
from benchmarks.engine.team import MeasureError


@pytest.fixture(autouse=True)
def one_thread():
    """As in the processes of the campaign: with more, steps that take microseconds wait for cores that others have."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def here(function, *arguments, limit_seconds=0):
    """In place of a process of its own."""
    try:
        return function(*arguments)
    except Exception as error:
        raise MeasureError(f"Traceback:\n{error}") from None


def one_row(plan):
    return [Section("one", "A part that works", "s", rows={"row": [1.0] * plan.repeat})]


def fails(plan):
    raise ValueError("no such device [sic]")


def run(monkeypatch, folder, *arguments):
    monkeypatch.setattr(sys, "argv", ["benchmarks", f"--root={folder}", f"--out={folder}", "--quick", *arguments])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which `main` sets where it is not set
    campaign.main()
    found = json.loads((folder / "bench.json").read_text())
    return found


def test_a_part_that_fails_takes_no_other_along(tmp_path, monkeypatch, capsys):
    written = []

    def look(plan):
        written.append({each["key"] for each in json.loads((tmp_path / "bench.json").read_text())["sections"]})
        return []

    monkeypatch.setattr(campaign, "fresh", here)
    monkeypatch.setattr(campaign, "PARTS", {"first": [one_row], "second": [fails, look]})
    with pytest.raises(SystemExit, match="not measured, see above: second, 1 of 2"):
        run(monkeypatch, tmp_path)
    assert written == [{"one"}], "it is on disk when the part ends, not when the campaign does"
    result = json.loads((tmp_path / "bench.json").read_text())
    assert result["failed"] == {"second, 1 of 2": "no such device [sic]"}
    assert result["sections"][0]["rows"] == {"row": [1.0]}
    shown = capsys.readouterr().out
    assert "A part that works" in shown
    assert "second, 1 of 2 has failed: no such device [sic]" in shown


def test_without_a_gpu_its_part_is_left_out_and_refused_where_it_is_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(campaign, "fresh", here)
    monkeypatch.setattr(campaign, "PARTS", {"first": [one_row], "gpu": [fails]})
    monkeypatch.setattr(campaign.torch.cuda, "is_available", lambda: False)
    assert run(monkeypatch, tmp_path)["failed"] == {}
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, "--only", "gpu")
    assert "--device cpu tries out the script" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("loop", gpu.LOOPS)
def test_the_gpu_part_tried_out_on_the_cpu(tmp_path, monkeypatch, loop):
    monkeypatch.setattr(gpu, "fresh", here)
    monkeypatch.setattr(gpu, "NAMES", (CKPTMAN, gpu.OVERLAP))
    monkeypatch.setattr(gpu, "QUIET_SECONDS", 0.02)
    plan = Plan(1 << 20, 2, tmp_path, True, "cpu")
    sections = {each.key: each for each in gpu.beside_saves(loop, plan)}
    assert sections[f"gpu_stall, {loop}"].missing == {}
    assert {name: len(each) for name, each in sections[f"gpu_stall_ratio, {loop}"].rows.items()} == {
        f"{CKPTMAN}, first": 1,
        f"{CKPTMAN}, later": 2,
        f"{gpu.OVERLAP}, first": 1,
        f"{gpu.OVERLAP}, later": 2,
    }
    asked = {bar.what: bar.bound for bar in bars(sections, None) if bar.samples}
    assert sorted(bound for bound in asked.values() if bound is not None) == [1.03, 1.03, 1.1, 20.0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_the_state_of_the_gpu_part_is_that_of_adamw():
    """Parameters and two moments, nearly all of it what optimizer steps alone change, so that overlap can show."""
    size = 8 << 20
    for make in gpu.LOOPS.values():
        training = make(size, torch.device("cpu"))
        held = sum(each.nbytes for each in gpu._tensors(training).values())
        parameters = sum(each.nbytes for each in training.model.parameters())
        assert size <= held <= 1.2 * size
        assert held == pytest.approx(3 * parameters, rel=0.01)


def test_a_contestant_whose_time_is_over_begins_no_further_round(tmp_path):
    plan = Plan(1 << 18, 50, tmp_path, True, "cpu")
    assert len(gpu._moves(CKPTMAN, 1 << 18, tmp_path, plan, time.monotonic())) == gpu.LEAST_ROUNDS - 1


@pytest.mark.filterwarnings("ignore::UserWarning")  # of DCP, that there is one process
def test_rates_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "fresh", here)
    monkeypatch.setattr(gpu, "SHM", str(tmp_path / "none" / "there"))
    save, load, *no_room = gpu.rates(Plan(1 << 18, 1, tmp_path, True, "cpu"))
    assert list(save.rows) == list(load.rows) == [CKPTMAN, gpu.DCP, gpu.TORCH]
    assert save.missing == load.missing == {}
    assert all(each.missing and not each.rows for each in no_room)

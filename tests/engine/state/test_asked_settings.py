import logging

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import ckptman
from ckptman.engine.state.asked_settings import asked_settings, replaced, texts_of


def run(root, caplog, last, schedule=None, kind=torch.optim.AdamW, by_hand=None, after=None, **settings):
    """The line of the log that tells what a restore replaced."""
    caplog.set_level(logging.INFO, "ckptman")
    caplog.clear()
    model = nn.Linear(2, 2)
    optimizer = kind(model.parameters(), **settings)
    made = schedule(optimizer) if schedule else None
    state = {"model": model, "optimizer": optimizer, **({"schedule": made} if made else {})}
    with ckptman.Checkpointer(root, state, save_policy=5, deadline=None) as checkpointer:
        start = checkpointer.restore()
        optimizer.param_groups[0].update(after or {})
        for step in range(start + 1, last + 1):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            if made:
                made.step(*(1.0,) * isinstance(made, lr_scheduler.ReduceLROnPlateau))
            if by_hand:
                by_hand(step, optimizer.param_groups[0])
            checkpointer.step(step)
    return [line for line in caplog.messages if "as saved" in line]


SCHEDULES = {
    "none": None,
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=10),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
    "warm-up": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.1),
    "by steps": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 8]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_script_that_asks_for_the_same_hears_nothing(tmp_path, caplog, name):
    for last in (5, 10):
        assert run(tmp_path, caplog, last, SCHEDULES[name], lr=0.1) == []


def test_what_a_restore_replaces_is_told_in_a_line(tmp_path, caplog):
    run(tmp_path, caplog, 5, SCHEDULES["cosine"], lr=0.1, weight_decay=0.01)
    longer = lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)  # noqa: E731
    (line,) = run(tmp_path, caplog, 10, longer, lr=0.01, weight_decay=0.001, betas=(0.5, 0.9))
    told = "betas (0.5, 0.9) -> (0.9, 0.999), lr 0.01 -> 0.1, weight_decay 0.001 -> 0.01, T_max 40 -> 10, as saved"
    assert told in line
    assert "after restore()" in line


def test_what_an_optimizer_finds_out_itself_is_no_news(tmp_path, caplog):
    prodigy = pytest.importorskip("prodigyopt").Prodigy
    for last in (5, 10):
        assert run(tmp_path, caplog, last, kind=prodigy) == []


def test_what_training_changed_is_no_news(tmp_path, caplog):
    plateau = lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)  # noqa: E731
    by_hand = lambda step, group: group.update(weight_decay=0.1 * step, betas=(0.9, 1 - 0.1**step))  # noqa: E731
    for last in (5, 10, 15):
        assert run(tmp_path, caplog, last, plateau, by_hand=by_hand, lr=0.1) == []
    for last in (20, 25):  # as long as the script asks for something else
        (line,) = run(tmp_path, caplog, last, plateau, by_hand=by_hand, lr=0.2)
        assert "lr 0.2 -> " in line
        assert "weight_decay" not in line
    assert run(tmp_path, caplog, 30, plateau, by_hand=by_hand, lr=0.1) == []


def test_what_is_set_after_the_restore_is_no_news_later(tmp_path, caplog):
    run(tmp_path, caplog, 5, lr=0.1)
    (line,) = run(tmp_path, caplog, 10, lr=0.2, after={"lr": 0.2})
    assert "lr 0.2 -> 0.1, as saved" in line
    assert run(tmp_path, caplog, 15, lr=0.2, after={"lr": 0.2}) == []


def test_what_many_groups_ask_for_is_a_digest():
    def texts(last):
        groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": 1 / number} for number in range(2, 60)]
        groups[-1]["lr"] = last
        return texts_of(asked_settings({"optimizer": torch.optim.SGD(groups, lr=0.1)}))

    assert texts(1.0)["optimizer.momentum"] == "0"
    assert texts(1.0) == texts(1.0) != texts(2.0)
    assert len(texts(1.0)["optimizer.lr"]) == 32


def test_without_a_note_of_the_start_what_schedules_drive_is_left_out():
    asked = {("optimizer", 0, "lr"): 0.1, ("optimizer", 0, "weight_decay"): 0.1}
    now = dict.fromkeys(asked, 0.2)
    assert replaced(asked, now, {}) == "weight_decay 0.1 -> 0.2"

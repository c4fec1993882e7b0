"""The state of optimizers comes back by the names of their parameters."""

import torch
from torch import nn

import ckptman


def test_an_optimizer_made_of_named_parameters(tmp_path):
    """torch keeps the names in the group as a list, and stumbles over it where it flattens settings."""

    def make():
        model = nn.Linear(3, 2)
        return model, torch.optim.AdamW(model.named_parameters(), lr=0.5)

    model, optimizer = make()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.25
    ckptman.save({"model": model, "optimizer": optimizer}, tmp_path / "x")
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]

    again, fresh = make()
    ckptman.load({"model": again, "optimizer": fresh}, tmp_path / "x")
    assert fresh.param_groups[0]["param_names"] == ["weight", "bias"]
    assert fresh.param_groups[0]["lr"] == 0.25
    assert torch.equal(fresh.state[again.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])

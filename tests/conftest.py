"""How tests are shared out over processes: a file keeps its fixtures, and there is one cluster."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        in_cluster = item.path.parent.name == "slurm"
        item.add_marker(pytest.mark.xdist_group("slurm" if in_cluster else item.path.stem))

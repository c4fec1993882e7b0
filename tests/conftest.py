"""What all tests begin with."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.helpers import forkserver

# No time limit for each example: the machine may be busy. `timeout` in pyproject.toml is that of a test.
settings.register_profile("ckptman", deadline=None, print_blob=True)
settings.load_profile("ckptman")

TESTS = Path(__file__).parent
LONG = ("docs", "slurm", "faults", "end_to_end", "integrations")
"""Folders whose tests take longest: they begin first, so that no worker is left with one of them at the end."""

# A shell that starts a command in the background has it ignore Ctrl-C, which its children would inherit: a test of an
# interrupt would then wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _handlers() -> list[object]:
    return [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.exit]


@pytest.fixture(autouse=True)
def _handlers_stay() -> Iterator[None]:
    """A handler that a test leaves behind would be found by those after it."""
    before = _handlers()
    yield
    assert _handlers() == before


def pytest_configure() -> None:
    forkserver.own()


def pytest_unconfigure() -> None:
    forkserver.disown()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Under `-m gpu`, collect that folder alone: the others need packages that a machine with a GPU may lack."""
    is_other = collection_path.parent == TESTS and collection_path.name != "gpu"
    return True if is_other and config.option.markexpr == "gpu" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a real Slurm as slow, and let the longest begin first."""
    for item in items:
        if item.path.is_relative_to(TESTS / "slurm"):
            item.add_marker(pytest.mark.slow)
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    folder = item.path.relative_to(TESTS).parts[0]
    return LONG.index(folder) if folder in LONG else len(LONG)

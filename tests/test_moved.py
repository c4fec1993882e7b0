"""What users import by the names of before is what there is today, and never a second one of it."""

import importlib
import subprocess
import sys

import pytest

import ckptman
from ckptman._moved import MOVED

NAMES_OF_BEFORE = [
    *("AtMost", "AtStep", "BeforeDeadline", "BusyError", "Checkpointer", "CkptmanError", "CommitError", "ConfigError"),
    *("CorruptError", "DalyInterval", "EverySeconds", "EverySteps", "ExistsError", "FormatVersionError"),
    *("InitTimeInterval", "IntervalError", "KeepBest", "KeepDaily", "KeepEvery", "KeepHourly", "KeepLast"),
    *("KeepMonthly", "KeepSteps", "KeepWeekly", "KeepWithin", "MismatchError", "NotFoundError", "OnStop", "RNGState"),
    *("RankLostError", "RetentionPolicy", "RootError", "SavePolicy", "SchedulerError", "SignalHandler"),
    *("StorageReader", "StorageWriter", "SuspectError", "Tier", "UnknownKeyError", "__version__", "adopt", "export"),
    *("load", "save"),
]


@pytest.mark.parametrize("name", NAMES_OF_BEFORE)
def test_each_name_of_before_is_there(name):
    assert getattr(ckptman, name)
    assert name in dir(ckptman)


@pytest.mark.parametrize("name", MOVED)
def test_a_module_has_its_old_name_too(name):
    module = importlib.import_module(MOVED[name])
    assert importlib.import_module(name) is module
    assert module.__spec__ is not None
    assert (module.__name__, module.__spec__.name) == (MOVED[name], MOVED[name])


def test_the_top_is_short_and_all_of_it_is_there():
    assert len(ckptman.__all__) <= 16
    assert all(getattr(ckptman, name) for name in ckptman.__all__)
    assert ckptman.dcp.StorageReader is ckptman.StorageReader
    assert ckptman.policies.KeepLast is ckptman.KeepLast
    assert ckptman.errors.BusyError is ckptman.BusyError


@pytest.mark.slow
def test_functions_stay_functions_whatever_was_imported_before():
    code = "import ckptman, ckptman.checkpointer, ckptman.exporting.export, ckptman.api, ckptman.policy.saving\n"
    code += "assert all(map(callable, (ckptman.save, ckptman.load, ckptman.export, ckptman.adopt)))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_was_never_there_is_not_there():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ckptman.nothing
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("ckptman.store.nothing")

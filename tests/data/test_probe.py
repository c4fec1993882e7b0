"""Loaders measured alone: what they give, what was read for it, and what is said of those that cannot be measured."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections import UserDict
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import ckptman.data.resumable_loader  # noqa: F401 so that no process of a probe takes seconds to import it
from ckptman.data.loader_source import LoaderSource, find_function, parse_source
from ckptman.data.probe import Weight, probe_loader, usual_workers, weigh
from ckptman.errors import CkptmanError, ConfigError, NotFoundError

SAMPLE = 4096


class Tokens(Dataset):
    """Samples of 4 KiB of one file, each of which may do something first."""

    def __init__(self, path, first=lambda index: None):
        self.path, self.first = path, first

    def __len__(self):
        return self.path.stat().st_size // SAMPLE

    def __getitem__(self, index):
        self.first(index)
        with self.path.open("rb") as file:
            file.seek(index * SAMPLE)
            return torch.frombuffer(bytearray(file.read(SAMPLE)), dtype=torch.uint8)


@pytest.fixture
def path(tmp_path):
    (tmp_path / "tokens").write_bytes(os.urandom(64 * SAMPLE))
    return tmp_path / "tokens"


def measured(function, **options):
    options = {"seconds": 30.0, "timeout_seconds": 60.0, **options}
    return probe_loader(lambda: LoaderSource("it", function), **options)


def making(dataset, **options):
    """A function that makes a loader with as many workers as it is asked for."""
    return lambda num_workers: DataLoader(dataset, 4, num_workers=num_workers, **options)


def test_each_number_of_workers_is_measured_twice_over_the_same_samples(path, tmp_path):
    log = tmp_path / "log"

    def note(index):
        with log.open("a") as file:
            file.write(f"{index}\n")

    found = measured(making(Tokens(path, note), shuffle=True), workers=[0, 1], data=[path])
    assert found.problem is None
    assert found.files == [str(path)]
    assert found.dropped == 1
    assert [each.workers for each in found.measurements] == [0, 1]
    for each in found.measurements:
        for one in (each.cold, each.warm):
            assert one.taken == one.read_batches == 16
            assert one.weight.samples == 4 * one.weight.batches
            assert one.weight.bytes == SAMPLE * one.weight.samples
            assert one.batches_per_second > 0
            assert one.read_bytes is None or one.read_bytes >= 64 * SAMPLE
        assert each.cold.is_whole
    orders = np.array(log.read_text().split(), int).reshape(4, 64)
    assert (orders == orders[0]).all(), "one measurement had other samples than another"
    assert sorted(orders[0]) == list(range(64)) != list(orders[0])


def test_an_endless_one_is_left_after_its_time(path):
    def endless():
        while True:
            yield {"x": torch.zeros(8, 4)}

    found = measured(endless, seconds=0.05)
    [only] = found.measurements
    assert (only.workers, only.cold.is_whole, only.warm.is_whole) == (0, False, False)
    assert only.warm.taken <= only.cold.taken
    assert only.cold.weight.bytes == 128 * only.cold.weight.batches


def test_files_that_are_open_or_mapped_are_found(path):
    mapped = np.memmap(path, "u1", "r", shape=(64, SAMPLE))

    def make(num_workers):
        held = path.with_name("held").open("w+")
        return DataLoader([(row.copy(), held.closed) for row in mapped], 4, num_workers=num_workers)

    found = measured(make, workers=[0])
    assert str(path) in found.files


def test_a_dataset_is_wrapped_and_workers_are_those_of_the_loader(path):
    found = measured(lambda: Tokens(path), workers=[1])
    assert [each.workers for each in found.measurements] == [1]
    assert found.measurements[0].cold.weight.samples == 64, "two batches of 32"
    found = measured(lambda num_workers: DataLoader(Tokens(path), 4), workers=[0, 2])
    assert [each.workers for each in found.measurements] == [0]
    found = measured(lambda num_workers: DataLoader(Tokens(path), 4, num_workers=1), workers=[2])
    assert [each.workers for each in found.measurements] == [1]
    assert found.notes == ["it was asked for 2 workers, and made 1."]


def test_no_workers_are_left_out_where_the_loader_refuses_that(path, monkeypatch):
    monkeypatch.setattr("ckptman.data.probe.allowed_cpus", lambda: 1)
    make = making(Tokens(path), prefetch_factor=1)
    found = measured(make)
    assert [each.workers for each in found.measurements] == [1]
    assert "Not measured without workers: it with 0 workers raised ValueError" in found.notes[0]
    with pytest.raises(CkptmanError, match="raised ValueError"):
        measured(make, workers=[0])


@pytest.mark.parametrize(("cpus", "workers"), [(1, [0, 1]), (2, [0, 1, 2]), (6, [0, 1, 2, 4, 6]), (8, [0, 1, 2, 4, 8])])
def test_the_usual_numbers_of_workers(cpus, workers):
    assert usual_workers(cpus) == workers


@dataclass
class Record:
    inputs: torch.Tensor
    label: int = 0


class Pair(NamedTuple):
    left: torch.Tensor
    right: list[Any]


class Plain:
    def __init__(self, tensor):
        self.tensor = tensor
        self.me = self


X = torch.zeros(6, 10)  # 240 bytes


@pytest.mark.parametrize(
    ("batch", "batch_size", "samples", "size"),
    [
        (X, None, 6, 240),
        ([X, torch.zeros(6)], 6, 6, 264),
        ({"ids": X, "text": ["a"] * 6}, 6, 6, 240),
        (UserDict(input_ids=X, attention_mask=X.clone()), None, 6, 480),
        (Record(X), None, 6, 240),
        (Pair(X, [X.clone(), None, "text"]), None, 6, 480),
        (Plain(X), None, 6, 240),
        (np.zeros((3, 2)), None, 3, 48),
        ([Record(torch.zeros(10)), Record(torch.zeros(10))], 2, 2, 80),
        ([torch.zeros(3, 2), torch.zeros(5, 2)], 2, 2, 64),
        (["a", "b", "c"], 3, 3, 0),
        ([X, X], None, 6, 240),
        (torch.tensor(1.0), None, 1, 4),
        (7, None, 1, 0),
        (None, None, 1, 0),
        (list(range(100_000)), None, 100_000, 0),
    ],
    ids=lambda each: type(each).__name__,
)
def test_what_a_batch_holds(batch, batch_size, samples, size):
    assert weigh(batch, batch_size) == Weight(1, samples, size)


def at_33(what):
    return lambda index: what() if index == 33 else None


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise KeyError("no such sample")


@pytest.mark.parametrize(
    ("what", "workers", "complaint"),
    [
        (fail, 0, r"0 workers after 8 batches raised KeyError: 'no such sample' \(test_probe.py:\d+\): correct"),
        (fail, 1, r"1 worker after 8 batches raised KeyError: 'no such sample' \(test_probe.py:\d+\): correct"),
        (die, 0, r"0 workers.*: the process of the loader was killed by SIGKILL"),
        (die, 1, r"it with 1 worker after \d batches: a worker died \(.*\): out of memory\?"),
        (lambda: os._exit(3), 1, r"a worker died"),
        (lambda: os._exit(0), 0, r"the process of the loader ended with no result"),
        (sys.exit, 0, r"raised SystemExit"),
    ],
)
def test_a_dataset_that_breaks_is_told_in_a_line(path, what, workers, complaint):
    with pytest.raises(CkptmanError, match=complaint) as caught:
        measured(making(Tokens(path, at_33(what))), workers=[workers])
    assert "\n" not in str(caught.value)


def test_what_was_measured_before_is_kept(path):
    def fail_in_a_worker():
        if torch.utils.data.get_worker_info() is not None:
            fail()

    found = measured(making(Tokens(path, at_33(fail_in_a_worker))), workers=[0, 1])
    assert [each.workers for each in found.measurements] == [0]
    assert "it with 1 worker after 8 batches raised KeyError" in str(found.problem)


def test_one_that_hangs_is_given_up_and_its_workers_end(path, tmp_path):
    def hang():
        (tmp_path / "pid").write_text(str(os.getpid()))
        threading.Event().wait()

    torch.zeros(1)  # or importing it would take the time
    with pytest.raises(CkptmanError, match=r"^1 worker, cold: 1 taken: nothing came for 3 s: give it longer"):
        measured(making(Tokens(path, at_33(hang))), workers=[1], timeout_seconds=3.0, data=[path])
    pid = int((tmp_path / "pid").read_text())
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            os.sched_yield()


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (lambda: None, "it returns None, not a loader"),
        (lambda num_workers: 7, "it returns a int, not a loader"),
        (lambda: "text", "it returns a str"),
        (lambda: (DataLoader([1]), DataLoader([2])), "it returns 2 loaders or values: return the one"),
        (lambda: iter(()), "it with 0 workers gives no batch"),
        (lambda num_workers: DataLoader([1, 2], 4, drop_last=True), "gives no batch: its dataset, or the share"),
        (lambda path, *, size: None, r"it needs arguments \(path, size\)"),
        (lambda: 1 / 0, r"it with 0 workers raised ZeroDivisionError: division by zero \(test_probe.py:\d+\)"),
    ],
)
def test_a_function_that_makes_no_loader(function, complaint):
    with pytest.raises(CkptmanError, match=complaint):
        measured(function, workers=None)


def test_workers_cannot_be_chosen_where_the_function_takes_none(path):
    with pytest.raises(ConfigError, match="it takes no num_workers, so --workers cannot choose"):
        measured(lambda: DataLoader(Tokens(path), 4), workers=[0, 2])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    files = {
        "good_train": "class Data:\n    @staticmethod\n    def make(): return [1]\n"
        "def make_loader(): return [2]\nnumber = 3",
        "json": "def make(): return [4]",
        "broken": "x = 1\nx / 0",
        "program": "import sys\nsys.exit(2)",
        "lacking": "import no_such_package.part",
        "relative": "from . import other",
        "syntax": "def (",
    }
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def test_modules_and_files_are_found(folder):
    assert find_function("good_train:make_loader")() == [2]
    assert find_function("good_train.py:make_loader")() == [2]
    assert find_function(f"{folder}/good_train.py:Data.make")() == [1]
    assert find_function("json.py:make")() == [4]
    assert sys.modules["json"] is json, "a file with the name of a module that is in use does not take its place"


@pytest.mark.parametrize(
    ("source", "kind", "complaint"),
    [
        ("good_train", ConfigError, "MODULE:FUNCTION, such as train:make_loader"),
        ("good_train:", ConfigError, "MODULE:FUNCTION"),
        ("good-train:make", ConfigError, "no name of a module"),
        ("good_trian:make", ConfigError, "no module good_trian .* did you mean good_train"),
        ("good_trian.py:make", NotFoundError, "no file good_trian.py: did you mean good_train.py"),
        ("good_train:make_laoder", ConfigError, "good_train has no make_laoder: did you mean make_loader"),
        ("good_train:zzz", ConfigError, "good_train has no zzz: it has Data, make_loader"),
        ("good_train:number", ConfigError, "good_train:number is a int, not a function"),
        ("broken:x", CkptmanError, r"broken cannot be imported: ZeroDivisionError: division by zero \(broken.py:2\)"),
        ("broken.py:x", CkptmanError, r"broken.py cannot be imported: ZeroDivisionError"),
        ("program.py:x", CkptmanError, r"program.py ends itself when it is imported \(exit code 2\): put"),
        ("lacking:x", CkptmanError, "lacking cannot be imported: ModuleNotFoundError.*; install no_such_package"),
        ("relative.py:x", CkptmanError, "part of a package: name it as package.module:function"),
        ("syntax.py:x", CkptmanError, "syntax.py cannot be imported: SyntaxError"),
    ],
)
def test_what_is_not_there_or_cannot_be_imported(folder, source, kind, complaint):
    with pytest.raises(kind, match=complaint) as caught:
        parse_source(source)
        find_function(source)
    assert "\n" not in str(caught.value)

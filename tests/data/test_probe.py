"""Loaders measured alone: their rates, and errors of those that cannot be measured."""

import json
import os
import signal
import sys
import threading
from collections import UserDict
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

import ckptman.data.resumable_loader  # noqa: F401 so that no process of a probe takes seconds to import it
from ckptman.data.loader_source import LoaderSource, find_function
from ckptman.data.probe import probe_loader, usual_workers, weigh
from ckptman.errors import CkptmanError, ConfigError, NotFoundError

SAMPLE = 4096


class Tokens(Dataset):
    """Samples of 4 KiB of one file. `first` is called with the index of each."""

    def __init__(self, path, first=lambda index: None):
        self.path, self.first = path, first

    def __len__(self):
        return self.path.stat().st_size // SAMPLE

    def __getitem__(self, index):
        self.first(index)
        with self.path.open("rb") as file:
            file.seek(index * SAMPLE)
            return torch.frombuffer(bytearray(file.read(SAMPLE)), dtype=torch.uint8)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.zeros(64))


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

    found = measured(making(Tokens(path, note), shuffle=True), workers=[0, 1, 1], data=[path])
    assert (found.problem, found.dropped_files) == (None, 1)
    assert [each.workers for each in found.measurements] == [0, 1]
    for each in found.measurements:
        assert each.cold.is_whole
        for one in (each.cold, each.warm):
            assert one.taken == 16
            assert one.bytes == SAMPLE * one.samples == SAMPLE * 4 * one.batches
            assert one.batches_per_second == one.batches / one.seconds >= each.batches_per_second
    orders = np.array(log.read_text().split(), int).reshape(4, 64)
    assert (orders == orders[0]).all(), "one measurement had other samples than another"
    assert sorted(orders[0]) == list(range(64)) != list(orders[0])


def test_an_endless_generator_is_left_after_its_time_and_made_again():
    def endless():
        while True:
            yield {"x": torch.zeros(8, 4)}

    [only] = measured(endless, seconds=0.05).measurements
    assert (only.workers, only.cold.is_whole, only.warm.is_whole) == (0, False, False)
    assert only.warm.taken == only.cold.taken
    assert only.cold.bytes == 128 * only.cold.batches
    [only] = measured(lambda: iter([torch.zeros(2)] * 9)).measurements
    assert only.cold.taken == only.warm.taken == 9


def test_each_worker_gives_two_batches_by_the_clock():
    [only] = measured(making(range(400)), workers=[1], seconds=1e-9).measurements
    assert (only.cold.taken, only.cold.batches, only.warm.batches) == (3, 2, 2)


@pytest.mark.parametrize("workers", [0, 1])
def test_files_that_are_open_or_mapped_are_dropped(path, workers):
    class LocalShard(Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            self.mapped = torch.from_file(str(path), shared=True, size=64, dtype=torch.uint8)  # in the worker
            return self.mapped[index]

    assert measured(making(LocalShard()), workers=[workers]).dropped_files == 1


def test_workers_are_those_that_the_loader_has(path):
    found = measured(lambda: Tokens(path), workers=[1])
    assert [(each.workers, each.cold.samples) for each in found.measurements] == [(1, 64)], "two batches of 32"
    assert isinstance(LoaderSource("it", lambda: Tokens(path)).make(0).sampler, RandomSampler)
    assert measured(Stream, workers=[0]).measurements[0].cold.taken == 2
    found = measured(lambda num_workers: DataLoader(Tokens(path), 4, num_workers=1), workers=[2, 1])
    assert [each.workers for each in found.measurements] == [1]
    assert found.notes == ["it was asked for 2 workers, and made 1."]
    assert [each.workers for each in measured(lambda: DataLoader(Tokens(path), 4)).measurements] == [0]
    with pytest.raises(ConfigError, match="it takes no num_workers, so --workers cannot choose"):
        measured(lambda: DataLoader(Tokens(path), 4), workers=[0, 2])


def test_a_loader_that_refuses_to_have_no_workers_is_measured_with_some(path, monkeypatch):
    monkeypatch.setattr("ckptman.data.probe.allowed_cpus", lambda: 1)
    make = making(Tokens(path), prefetch_factor=1)
    found = measured(make)
    assert [each.workers for each in found.measurements] == [1]
    assert found.notes[0].startswith("Not measured without workers: ValueError: prefetch_factor")
    with pytest.raises(CkptmanError, match="it with 0 workers raised ValueError"):
        measured(make, workers=[0])


@pytest.mark.parametrize(("cpus", "workers"), [(1, [0, 1]), (6, [0, 1, 2, 4, 6]), (8, [0, 1, 2, 4, 8])])
def test_the_usual_numbers_of_workers(cpus, workers):
    assert usual_workers(cpus) == workers


@dataclass(slots=True)
class Record:
    inputs: torch.Tensor
    label: int = 0


class Pair(NamedTuple):
    left: torch.Tensor
    right: list


class Plain:
    def __init__(self, tensor):
        self.tensor = tensor
        self.me = self


X = torch.zeros(6, 10)  # 240 bytes


@pytest.mark.parametrize(
    ("batch", "batch_size", "samples", "size"),
    [
        ([X, torch.zeros(6)], 6, 6, 264),
        ({"text": ["a"] * 6, "ids": X, "call": Plain}, 6, 6, 240),
        (UserDict(input_ids=X, attention_mask=X.clone()), None, 6, 480),
        (Record(X), None, 6, 240),
        (Pair(X, [X, None, "text"]), None, 6, 240),
        (Plain(X), None, 6, 240),
        (np.zeros((3, 2)), None, 3, 48),
        ([Record(torch.zeros(10)), Record(torch.zeros(10))], 2, 2, 80),
        (["a", "b", "c"], 3, 3, 0),
        (torch.tensor(1.0), None, 1, 4),
        (None, None, 1, 0),
        (list(range(100_000)), None, 100_000, 0),
    ],
    ids=lambda each: type(each).__name__,
)
def test_samples_and_bytes_of_a_batch(batch, batch_size, samples, size):
    assert weigh(batch, batch_size) == (samples, size)


def at_33(what):
    return lambda index: what() if index == 33 else None


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise KeyError("no such sample")


def disconnect():
    raise ConnectionError("gone")


@pytest.mark.parametrize(
    ("what", "workers", "complaint"),
    [
        (fail, 0, r"0 workers after 8 batches raised KeyError: 'no such sample' \(test_probe.py:\d+\): correct"),
        (fail, 1, r"1 worker after 8 batches raised KeyError: 'no such sample' \(test_probe.py:\d+\): correct"),
        (disconnect, 0, r"0 workers after 8 batches raised ConnectionError: gone"),
        (die, 0, r"0 workers.*: the process of the loader was killed by SIGKILL"),
        (die, 1, r"it with 1 worker after \d batches: a worker died \(.*\): out of memory\?"),
        (lambda: os._exit(0), 0, r"the process of the loader ended with no result"),
        (sys.exit, 0, r"raised SystemExit"),
    ],
)
def test_a_dataset_that_breaks_is_one_line(path, what, workers, complaint):
    with pytest.raises(CkptmanError, match=complaint) as caught:
        measured(making(Tokens(path, at_33(what))), workers=[workers])
    assert "\n" not in str(caught.value)


def test_a_loader_that_hangs_is_given_up_and_its_workers_end(path, tmp_path):
    def hang():
        (tmp_path / "pid").write_text(str(os.getpid()))
        threading.Event().wait()

    with pytest.raises(CkptmanError, match=r"^1 worker, cold: 1 taken: nothing came for 3 s: give it longer"):
        measured(making(Tokens(path, at_33(hang))), workers=[1], timeout_seconds=3.0, data=[path])
    pid = int((tmp_path / "pid").read_text())
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            os.sched_yield()


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (lambda: None, "it returns NoneType, not a loader"),
        (lambda: "text", "it returns str, not a loader"),
        (lambda: (DataLoader([1]), DataLoader([2])), "it returns tuple, not a loader: return one DataLoader"),
        (lambda: iter(()), "it with 0 workers gives no batch"),
        (lambda num_workers: DataLoader([1, 2], 4, drop_last=True), "gives no batch: its dataset, or the share"),
        (lambda path, *, size: None, "it: missing a required argument: 'path', and only num_workers is passed"),
        (lambda: 1 / 0, r"it with 0 workers raised ZeroDivisionError: division by zero \(test_probe.py:\d+\)"),
    ],
)
def test_a_function_that_makes_no_loader(function, complaint):
    with pytest.raises(CkptmanError, match=complaint):
        measured(function)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


GOOD = "class Data:\n    make = lambda: [1]\ndef make_loader(): return [2]\nnumber = 3"


def test_modules_and_files_are_found(folder):
    (folder / "good_train.py").write_text(GOOD)
    (folder / "json.py").write_text("def make(): return [4]")
    assert find_function("good_train:make_loader")() == [2]
    assert find_function("good_train.py:make_loader")() == [2]
    assert find_function(f"{folder}/good_train.py:Data.make")() == [1]
    assert find_function("json.py:make")() == [4]
    assert sys.modules["json"] is json, "a file with the name of a module that is in use does not replace it"


@pytest.mark.parametrize(
    ("text", "source", "kind", "complaint"),
    [
        (GOOD, "its-train:make", ConfigError, "MODULE:FUNCTION, such as train:make_loader or train.py:make_loader"),
        (GOOD, "its_trian:make", ConfigError, "no module its_trian .* did you mean its_train"),
        (GOOD, "its_trian.py:make", NotFoundError, "no file its_trian.py: did you mean its_train.py"),
        (GOOD, "its_train:make_laoder", ConfigError, "its_train has no make_laoder: did you mean make_loader"),
        (GOOD, "its_train:zzz", ConfigError, "its_train has no zzz: it has Data, make_loader"),
        (GOOD, "its_train:number", ConfigError, "its_train:number is of type int, not a function"),
        ("1\n1 / 0", "its_train:x", CkptmanError, r"cannot be imported: ZeroDivisionError: .* \(its_train.py:2\)"),
        ("exit(2)", "its_train.py:x", CkptmanError, r"ends itself when it is imported \(exit code 2\): put"),
        ("import no_such.part", "its_train:x", CkptmanError, "cannot be imported: ModuleNotFound.*; install no_such"),
        ("from . import x", "its_train.py:x", CkptmanError, "part of a package: name it as package.module:function"),
    ],
)
def test_a_function_that_is_not_there_or_cannot_be_imported(folder, text, source, kind, complaint):
    (folder / "its_train.py").write_text(text)
    with pytest.raises(kind, match=complaint) as caught:
        find_function(source)
    assert "\n" not in str(caught.value)

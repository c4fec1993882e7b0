"""The library, broken on purpose: a campaign that does not notice proves nothing.

Each mutant takes one guard away, in the process that calls `apply`.
"""

import contextlib
import json
import os
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

import ckptman
from ckptman import checkpointer, errors
from ckptman.engine.comm import control_group as ranks
from ckptman.engine.comm import replicas
from ckptman.engine.dcp import storage
from ckptman.engine.loading import checkpoint_reader as saved
from ckptman.engine.loading import exchange as sharing
from ckptman.engine.loading import loader
from ckptman.engine.loading import read_tensors as reading
from ckptman.engine.loading import restricted_unpickler as foreign
from ckptman.engine.saving import saver
from ckptman.engine.state import kept_parts, named_state, tensor_digest
from ckptman.engine.state import step_record as recorded
from ckptman.policies import retention_plan
from ckptman.policies.restore_choice import choose
from ckptman.session import restorer
from ckptman.storage.catalog import catalog as catalogue
from ckptman.storage.catalog import prune, tiers
from ckptman.storage.catalog import writer_lock as owner
from ckptman.storage.catalog.backends import local as place
from ckptman.storage.catalog.backends import local_draft
from ckptman.storage.format import chunk_table as chunks
from ckptman.storage.format import index, manifest
from ckptman.storage.format.paths import step_folder
from ckptman.storage.io import checked_reader as ranges
from ckptman.storage.io import file_writer as blockio
from ckptman.storage.io.durable_files import DISK, Disk
from ckptman.storage.transfer import drain


def _no_digests():
    ranges._File._check = lambda *_: None


def _no_manifest_digest():
    real = manifest._SEAL

    class Seal:
        def search(self, data, *start):
            found = real.search(data, *start)
            return found and _Anything(found.start(), manifest.xxh3_128_hexdigest(data[: found.start()]).encode())

    manifest._SEAL = Seal()


class _Anything:
    def __init__(self, start, digest):
        self._start, self._digest = start, digest

    def start(self):
        return self._start

    def __getitem__(self, _):
        return self._digest


def _descriptions_unchecked():
    index.read_checked = lambda folder, name, found: (folder / name).read_bytes()

    def open_table(folder, found, described):
        return chunks.ChunkTable.open(folder / "chunks.bin", described.tensors, found.files["chunks.bin"].bytes)

    for module in (index, saved):
        module.open_table = open_table


def _damage_is_not_told():
    real = reading.read_fills

    def read_fills(*arguments, **options):
        try:
            return real(*arguments, **options)
        except errors.CorruptError as error:
            raise errors.CorruptError(str(error).partition(". What was to be filled")[0]) from error

    for module in (reading, sharing, storage):
        module.read_fills = read_fills


def _files_not_flushed():
    Disk.write_file = lambda self, path, data: path.write_bytes(data) and None


def _data_not_flushed():
    Disk.sync_file = lambda self, fd: None


def _folders_not_flushed():
    Disk.sync_folder = lambda self, path: None


def _deleted_in_place():
    def hide(self, path, name, tag):
        DISK.remove_tree(path)
        return None

    place.LocalBackend.hide = hide


def _pruned_before_the_commit():
    real = place.LocalBackend.commit

    def commit(self, draft, made):
        for number, entry in enumerate(self.list()):
            self.remove(entry.path, step_folder(entry.step), f"early{number}")
        time.sleep(0.05)  # as on a slow disk: otherwise hardly a kill comes in between
        return real(self, draft, made)

    place.LocalBackend.commit = commit


def _copies_not_flushed():
    class Unflushed(local_draft.FileWriter):
        def flush(self, size_bytes=None):
            pass

    local_draft.FileWriter = Unflushed


def _copies_noted_too_early():
    real = drain.carry_out

    def carry_out(root, plan, means):
        held = tiers.read_drained(root)
        for task in plan.tasks:
            held[str(task.tier)] = [*held.get(str(task.tier), ()), task.entry.record()]
        tiers.write_drained(root, held)
        return real(root, plan, means)

    drain.carry_out = carry_out


def _tiers_are_not_awaited():
    prune.steps_awaiting_drain = lambda *arguments, **options: {}


def _finite_ones_may_go():
    real = retention_plan.untouchables

    def untouchables(records):
        return real([replace(each, nonfinite_metrics=(), nonfinite_tensors=()) for each in records])

    retention_plan.untouchables = untouchables


def _nonfinite_ones_are_restored():
    restorer.choose = lambda newest_first, suspects, prefer_finite=True: choose(
        newest_first, suspects, prefer_finite=False
    )


def _errors_swallowed():
    real = blockio.FileWriter.write

    def write(self, data, offset):
        with contextlib.suppress(OSError):
            real(self, data, offset)

    blockio.FileWriter.write = write


def _failed_saves_are_not_told():
    for name in ("save", "wait"):
        real = getattr(ckptman.Checkpointer, name)

        def quiet(self, *arguments, _real=real):
            with contextlib.suppress(errors.CommitError):
                return _real(self, *arguments)

        setattr(ckptman.Checkpointer, name, quiet)


def _listing_errors_are_nothing():
    real = catalogue.Catalog.names

    def names(self):
        try:
            return real(self)
        except errors.RootError:
            return []

    catalogue.Catalog.names = names


def _what_the_program_raises_is_damage():
    @contextlib.contextmanager
    def of_the_program(key, *_):
        try:
            yield
        except Exception as error:
            raise errors.CorruptError(f"{key}: {error}; restore an older checkpoint") from error

    named_state.of_the_program = of_the_program


def _damage_is_not_told_from_faults():
    loader._is_as_saved = lambda folder: False


def _replicas_are_not_compared():
    saver.compare_replicas = lambda *_: replicas.Compared()


def _replicas_are_sampled():
    real = tensor_digest.Digester._numbers

    def numbers(self, axis, offset, size, device):
        taken = torch.arange(offset, offset + size, device=device) % 2 == 0
        return real(self, axis, offset, size, device) * taken

    tensor_digest.Digester._numbers = numbers


def _replicas_are_compared_too_early():
    def compared(self, control, state, snapshot, info, stager):
        if not self._is_compared:
            self._replicas, self._is_compared = self.compare(control, state, snapshot), True
        return self._stage(state, snapshot, info.step, stager), replace(info, replicas=self._replicas)

    saver.Saver._compared = compared


def _waits_ten_times_as_long():
    real = ranks.Channel.__init__
    ranks.Channel.__init__ = lambda self, seconds: real(self, 10 * seconds)


def _errors_without_a_remedy():
    errors.CkptmanError.__str__ = lambda self: f"{type(self).__name__} in /some/path"


def _pickles_run():
    foreign._Restricted.find_class = pickle.Unpickler.find_class


def _nothing_escaped():
    for module in [each for name, each in sys.modules.items() if name.startswith("ckptman")]:
        for name in {"plain", "plain_lines"} & vars(module).keys():
            setattr(module, name, str)


def _names_may_leave():
    manifest.is_plain_name = lambda name: True
    foreign.is_plain_name = lambda name: True
    foreign._check_links = lambda folder, names: None


def _parsers_let_through():
    manifest.parse_versioned = lambda path, data: json.loads(data)
    index.parse_versioned = lambda path, data: json.loads(data)


def _swapped_memory_is_not_noticed():
    kept_parts._Tensors.are = lambda self, tensors: list(map(id, tensors)) == self._ids


def _settings_are_not_compared():
    kept_parts._is_equal = lambda one, other: True


def _the_end_saves_what_is_there():
    @contextlib.contextmanager
    def live(self, then):
        yield dict(self._state)

    recorded.StepRecorder.changed = lambda self, then: ""
    recorded.StepRecorder.as_of = live


def _children_end_the_run():
    checkpointer.os = _Process()
    owner.os = _Process()


class _Process:
    """The module `os`, for which every process is the same."""

    def __getattr__(self, name):
        return getattr(os, name)

    def getpid(self):
        return 1


class Mutant(NamedTuple):
    """What is broken, the kind of fault that has to notice it, as which failures, and with what share of that kind."""

    break_it: Callable[[], None]
    kind: str
    failures: tuple[str, ...]
    share: float = 0.05


MUTANTS = {
    "digests of blocks are not looked at": Mutant(_no_digests, "flips", ("wrong",)),
    "the digest of the manifest is not looked at": Mutant(_no_manifest_digest, "flips", ("wrong",), 0.2),
    "the digests of index and chunk table are not looked at": Mutant(_descriptions_unchecked, "flips", ("wrong",), 0.5),
    "a load that found damage does not say that values were changed": Mutant(_damage_is_not_told, "flips", ("wrong",)),
    "data files are not flushed": Mutant(_data_not_flushed, "crash", ("lost",)),
    "other files are not flushed": Mutant(_files_not_flushed, "crash", ("lost",)),
    "folders are not flushed": Mutant(_folders_not_flushed, "crash", ("lost",)),
    "checkpoints are deleted in place": Mutant(_deleted_in_place, "crash", ("lost",)),
    "a copy is made visible before its files are flushed": Mutant(_copies_not_flushed, "copy", ("lost",), 0.03),
    "what a tier is to get is noted before it is there": Mutant(_copies_noted_too_early, "copy", ("lost",), 0.1),
    "what a tier is to get may be deleted": Mutant(_tiers_are_not_awaited, "copy", ("lost",), 0.03),
    "the newest finite one may be deleted": Mutant(_finite_ones_may_go, "crash", ("lost",), 0.1),
    "what is not finite is restored": Mutant(_nonfinite_ones_are_restored, "crash", ("lost",), 0.1),
    "older ones are deleted before the new one is durable": Mutant(_pruned_before_the_commit, "kill", ("lost",), 0.1),
    "a failed write is taken for a good one": Mutant(_errors_swallowed, "io", ("lost", "wrong", "other"), 1.0),
    "a save that failed is not told": Mutant(_failed_saves_are_not_told, "disk", ("lost",), 0.5),
    "a root that cannot be listed is an empty one": Mutant(_listing_errors_are_nothing, "io", ("wrong",), 1.0),
    "what an object raises is damage of its checkpoint": Mutant(
        _what_the_program_raises_is_damage, "program", ("lost", "wrong"), 0.1
    ),
    "what a tensor raises is damage of its checkpoint": Mutant(
        _damage_is_not_told_from_faults, "program", ("lost", "wrong"), 0.1
    ),
    "replicas are not compared": Mutant(_replicas_are_not_compared, "replicas", ("wrong",), 0.04),
    "of replicas, every other element is compared": Mutant(_replicas_are_sampled, "replicas", ("wrong",), 0.08),
    "replicas are compared before the copy": Mutant(_replicas_are_compared_too_early, "replicas", ("wrong",), 0.08),
    "ranks wait ten times as long": Mutant(_waits_ten_times_as_long, "ranks", ("hang",), 0.15),
    "errors do not say what to do": Mutant(_errors_without_a_remedy, "files", ("unclear",)),
    "pickles may ask for anything": Mutant(_pickles_run, "hostile", ("code",), 0.25),
    "memory that was swapped is not noticed": Mutant(
        _swapped_memory_is_not_noticed, "changes", ("wrong", "other"), 0.3
    ),
    "settings are taken from the save before": Mutant(_settings_are_not_compared, "changes", ("wrong",), 0.3),
    "the end of a run saves what is there": Mutant(_the_end_saves_what_is_there, "user", ("wrong",), 0.02),
    "a forked child ends the run": Mutant(_children_end_the_run, "user", ("wrong", "hang", "other"), 0.02),
    "names are not escaped": Mutant(_nothing_escaped, "hostile", ("other",), 0.5),
    "names and links may leave the folder": Mutant(_names_may_leave, "hostile", ("other",), 0.5),
    "what JSON cannot be is not caught": Mutant(_parsers_let_through, "fuzz", ("unclear",)),
}
"""By what is broken."""


def apply(name):
    """Break the library in this process; `""` leaves it as it is."""
    if name:
        MUTANTS[name].break_it()

"""Loading a checkpoint into an application: read what it holds, see on all ranks whether it fits, fill, apply."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch

from ckptman.engine.comm.control_group import Channel, Contribution, RankFailed
from ckptman.engine.comm.replicas import agree_on_frozen
from ckptman.engine.loading.allowed_mismatches import (
    EVERYTHING,
    AllowedMismatches,
    Skipped,
    matches_any,
    names_nothing,
    patterns_of,
)
from ckptman.engine.loading.checkpoint_reader import SavedState, read_to_load
from ckptman.engine.loading.exchange import SharedReads
from ckptman.engine.loading.fit import Fit, FitReport, Part, State, name_as
from ckptman.engine.loading.other_weights import OtherWeights
from ckptman.engine.loading.read_tensors import NOT_USABLE, fills_for_all, read_fills
from ckptman.engine.state.modules import Trainable
from ckptman.engine.state.optimizers import as_before_on_error
from ckptman.errors import CkptmanError, ConfigError, CorruptError, MismatchError
from ckptman.runtime.stopwatch import Stopwatch
from ckptman.storage.format.manifest import read_manifest
from ckptman.storage.format.paths import MANIFEST
from ckptman.storage.integrity.folder_check import check_coverage, verify_folder
from ckptman.storage.io.failure_cause import Trouble, trouble_of_load
from ckptman.storage.io.threads import preferred

_TROUBLES: dict[Trouble, str] = {
    "shortage": "rank {rank} has not enough memory or open files to load it ({text}): load it on more ranks, ask "
    "for more memory, or allow more open files (ulimit -n); `ckptman verify {folder}` tells if it is what was saved",
    "away": "the file system does not answer on rank {rank} ({text}): check the mount there, and start again; "
    "`ckptman verify {folder}` tells if it is what was saved",
    "denied": "this user may not read it on rank {rank} ({text}): check its permissions there, and start again",
    "device": "the device of rank {rank} failed ({text}): leave its node out, and start again; "
    "`ckptman verify {folder}` tells if it is what was saved",
}
"""What to say where a rank could not load, and that says nothing about the checkpoint."""


def load(
    channel: Channel,
    state: State,
    folder: Path,
    accepted: AllowedMismatches,
    *,
    strict: bool = True,
    verify: bool = True,
    others: OtherWeights | None = None,
    bring: Callable[[Collection[str]], None] | None = None,
    watch: Stopwatch | None = None,
) -> Skipped:
    """Load a checkpoint into an application's state, in place. Every rank calls it.

    Args:
        accepted: what may be missing in the checkpoint and stays as it is, and what may be unexpected in it and is left
            there; alike on every rank.
        strict: modules and optimizers must have exactly the names that were saved, and all other state becomes what was
            saved, as for a restore. False: what the state holds is looked for.
        verify: check every block that is read.
        others: what to take of the checkpoint of another run.
        bring: `folder` has some of the data files only; called on every rank, it brings those that this one needs.
        watch: records how long each part of the load takes.

    Returns what was skipped.

    Raises on every rank alike: MismatchError, or ConfigError for a pattern that names nothing, before anything is
    copied; CorruptError if a rank cannot read it, or reads other bytes than were saved: then what its text says is not
    usable.
    """
    watch = watch or Stopwatch()
    with preferred():
        saved = _read_on_all(channel, state, folder, others or OtherWeights(), is_whole=bring is None)
    trainables = {name: each for name, each in state.items() if isinstance(each, Trainable)}
    for name, each in trainables.items():
        each.expect(saved.values.get(name, {}))
    agree_on_frozen(channel, state)
    fit = Fit(state, saved, channel.rank, accepted, strict=strict, verify=verify)
    together = SharedReads(channel) if bring is None else None
    with preferred(), ExitStack() as before:
        before.enter_context(as_before_on_error(state.values()))
        skipped = _match_on_all(channel, fit, folder, accepted, strict, together)
        if bring is not None:
            with _blamed_on_all(channel, folder, reads=False):
                files = channel.run_on_all(lambda: {each.chunk.file for each in fills_for_all(saved, fit.targets)})
            bring(files[channel.rank])

        def keep() -> None:
            for each in trainables.values():
                before.enter_context(each.filled_or_as_before())

        watch.ends("plan")
        if Part.TRAINABLES in fit.parts:  # the copies may be too much for the memory of one rank
            with _blamed_on_all(channel, folder, reads=False):
                channel.agree("load()", keep)
        # Objects that may refuse what they are given come first: then the model is as it was when one does.
        for part in (Part.OBJECTS, Part.IN_PLACE):
            if part not in fit.parts:
                continue
            names = fit.names(part)
            _fill(channel, saved, part, fit.tensors_of(names), folder, verify, together)
            watch.ends("read")
            try:
                channel.agree("load()", partial(fit.apply, names))
                watch.ends("fill")
            except RankFailed as failed:  # an object refused its state: no older checkpoint would help
                failed.raise_on_this_rank(NOT_USABLE if part is Part.IN_PLACE or not strict else "")
    return skipped


def _read_on_all(channel: Channel, state: State, folder: Path, others: OtherWeights, *, is_whole: bool) -> SavedState:
    """Read what a checkpoint holds, and see that every rank reads the same one.

    Raises on every rank alike: CorruptError; CkptmanError where they see different ones under its name.
    """
    saved: list[SavedState] = []

    def read() -> str:
        saved.append(read_to_load(folder, channel.rank, is_whole=is_whole))
        others.apply(saved[0])
        name_as(state, saved[0])
        return saved[0].identity

    with _blamed_on_all(channel, folder):
        met = channel.agree("load()", lambda: Contribution(read()))
    if met.unlike is not None:
        raise CkptmanError(f"{folder}: the ranks see different checkpoints, as it was replaced just now: load it again")
    return saved[0]


def _match_on_all(
    channel: Channel, fit: Fit, folder: Path, accepted: AllowedMismatches, strict: bool, together: SharedReads | None
) -> Skipped:
    """See on all ranks whether a checkpoint fits, but for what is accepted, which is returned.

    Raises on every rank alike: MismatchError; ConfigError, a pattern names nothing; CorruptError.
    """
    try:
        channel.agree("load()", fit.ask)
    except RankFailed as failed:  # the state_dict of an object failed: that says nothing about the checkpoint
        _raise_trouble(failed, folder)
        failed.raise_on_this_rank()

    def match() -> Contribution:
        report = fit.match()
        shared = together.find(fit.targets_by_part()) if together is not None else {}
        return Contribution((report, shared), (report.key(), fit.all_expected(), sorted(shared.items())))

    with _blamed_on_all(channel, folder, reads=False):
        reports = channel.agree("load()", match).unlike
    if reports is None:
        found = fit.report
        besides = {*fit.unexpected(found.wanted)}
    else:
        found = FitReport.of_all(report for report, _ in reports)
        besides = set[str]().union(*channel.gather(fit.unexpected(found.wanted)))
        if together is not None:
            together.keep_known([shared for _, shared in reports])
    fit.note_all(found)
    unexpected = sorted(name for name in besides if not matches_any(accepted.unexpected, name))
    for pattern in accepted.missing:  # not of `unexpected`: after the next save, nothing has what they name
        if pattern not in found.known:
            raise names_nothing(pattern, found.kinds)
    if found.missing or found.mismatched or unexpected:
        missing, mismatched = sorted(found.missing), sorted(found.mismatched)
        differing = [*missing, *unexpected, *(line.partition(": ")[0] for line in mismatched)]
        given = accepted.unexpected if strict or accepted.unexpected != EVERYTHING else ()
        accepts = channel.run_on_leader(
            lambda: AllowedMismatches(
                (*accepted.missing, *patterns_of(missing, found.wanted)),
                (*(each for each in given if each in found.known), *patterns_of(unexpected, fit.saved_names())),
            )
        )
        told = "" if mismatched else f"{'restore' if strict else 'load'}({accepts})"
        left = channel.run_on_leader(lambda: fit.not_in_groups(unexpected))
        call = "restore()" if strict else "load()"
        hint = (
            f"These parameters were in a group of the optimizer then: {left}. Add them (add_param_group) before {call}"
        )
        raise MismatchError(
            str(folder), missing, unexpected, mismatched, _subject(found.kinds, differing), told, hint if left else ""
        )
    return Skipped(tuple(sorted(found.kept)), tuple(sorted(besides | found.left)))


def _subject(kinds: Mapping[str, str], names: Iterable[str]) -> str:
    """Return what to call all that these names belong to."""
    keys = (next((key for key in kinds if name == key or name.startswith(f"{key}.")), name) for name in names)
    *others, last = dict.fromkeys(kinds.get(key, repr(key)) for key in keys)
    return f"{', '.join(others)} and {last}" if others else last


def _fill(
    channel: Channel,
    saved: SavedState,
    part: Part,
    targets: Mapping[str, torch.Tensor],
    folder: Path,
    verify: bool,
    together: SharedReads | None,
) -> None:
    """Fill the targets of all ranks, reading once what several of them need, if they are `together`.

    Raises on every rank alike: CorruptError, and then no target is usable.
    """
    try:
        with _blamed_on_all(channel, folder):
            if together is not None:
                together.read(saved, part.value, targets, verify=verify)
            else:
                channel.run_on_all(lambda: read_fills(saved, fills_for_all(saved, targets), verify=verify))
    except CkptmanError as error:
        # Others were raised before anything was read, or say it already.
        if type(error) not in (CkptmanError, CorruptError) or "is not usable" in str(error):
            raise
        raise type(error)(f"{error}. {NOT_USABLE}") from error


@contextmanager
def _blamed_on_all(channel: Channel, folder: Path, *, reads: bool = True) -> Iterator[None]:
    """Turn what failed on one rank into an error on all that blames what it should: a CorruptError only where storage,
    digests or format say that the checkpoint is damaged. Whatever else was raised is looked into: if every byte is what
    was saved, it is an object of the program that raised it; so it is if nothing was read (`reads`) and nothing is
    there to check the bytes against."""
    try:
        yield
    except RankFailed as failed:
        failure = failed.failure
        if failure.error is not None:
            failed.raise_on_this_rank()
        _raise_trouble(failed, folder)
        is_as_saved = channel.run_on_leader(lambda: _is_as_saved(folder)) if failure.errno is None else False
        if is_as_saved or (is_as_saved is None and not reads):
            good = "the checkpoint is good, every byte of it is what was saved"
            raise ConfigError(
                f"an object of the state failed on rank {failure.rank} while {folder} was loaded into it: "
                f"{failure.text}. Correct the object: {good if is_as_saved else 'nothing was read yet'}"
            ) from failed
        raise CorruptError(
            f"{folder} cannot be read on rank {failure.rank}: {failure.text}; check the mount there, or restore an "
            f"older checkpoint"
        ) from failed


def _raise_trouble(failed: RankFailed, folder: Path) -> None:
    """Raise what says nothing about the checkpoint, such as memory that is short. Raises: CkptmanError."""
    failure = failed.failure
    if (trouble := trouble_of_load(failure.text, failure.errno)) is not None:
        told = _TROUBLES[trouble].format(rank=failure.rank, text=failure.text, folder=folder)
        raise CkptmanError(f"{folder}: {told}") from failed


def _is_as_saved(folder: Path) -> bool | None:
    """Return whether all bytes of a checkpoint match their digests; None if it has none, as those of plain DCP."""
    try:
        if not (folder / MANIFEST).exists():
            return None
        manifest = read_manifest(folder)
        return verify_folder(folder, manifest).good and not check_coverage(folder, manifest)
    except (CkptmanError, OSError):
        return False

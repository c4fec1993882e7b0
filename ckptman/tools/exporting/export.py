"""`export`: a checkpoint, or a part of it, for other programs: safetensors, one file of torch.save, plain DCP."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import get_args

from ckptman._tracebacks import short_traceback
from ckptman.engine.loading.box_reader import BoundedState, BoxReader
from ckptman.engine.loading.checkpoint_reader import SavedState
from ckptman.errors import CkptmanError, ConfigError, CorruptError, NotFoundError
from ckptman.run import checkpoint_at
from ckptman.storage.catalog.reader_lease import reading
from ckptman.storage.format.paths import MANIFEST, METADATA
from ckptman.storage.format.renaming import renaming
from ckptman.storage.io.durable_files import DISK
from ckptman.storage.io.file_scan import Stamp, stamp_of
from ckptman.tools.exporting.choice import CASTS, Choice, Item, choose, excluding
from ckptman.tools.exporting.formats import config_file, dcp_files, safetensors_files, torch_file
from ckptman.tools.exporting.target import OLD, Format, check_target, clear_leftovers, draft_of
from ckptman.tools.exporting.write import FilePlan, same_bits, write_files

MAX_SHARD_BYTES = 5_000_000_000
_OUTPUT = "lm_head.weight"
_INPUTS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "tok_embeddings.weight")
"""How models of Hugging Face call their input embedding, to which the output is tied."""


@dataclass
class Exported:
    """The result of an export: the files with their sizes in bytes, and how many tensors of how many bytes are in them.

    `remarks`: what was left out or is unusual, one sentence each.
    """

    path: Path
    files: dict[str, int] = field(default_factory=dict)
    tensors: int = 0
    bytes: int = 0
    remarks: list[str] = field(default_factory=list)


@short_traceback
def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    format: Format = "safetensors",
    *,
    only: str | None = None,
    everything: bool = False,
    exclude: Sequence[str] = (),
    dtype: str | None = None,
    strip: str = "",
    rename: Sequence[tuple[str, str]] = (),
    tied: Sequence[tuple[str, str]] = (),
    config: str | os.PathLike[str] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    begin: Callable[[int], Callable[[int], None] | None] | None = None,
) -> Exported:
    """Write the model of a checkpoint, or another part of it, for other programs.

    Memory: about 100 MB plus the index of the checkpoint, however large its tensors are. Every block that is read is
    checked against its digest. With several processes, call it on one of them.

    Args:
        path: A checkpoint written by ckptman, plain DCP or torchtitan; or a root, and then its newest checkpoint.
        out: The folder to write (for `torch`: the file). It appears when it is complete.
        format: `safetensors`, `torch` (one file for `torch.load`) or `dcp`.
        only: Export this entry of the state instead of `model`.
        everything: Export the whole state.
        exclude: Regular expressions; a name in which one of them is found is left out.
        dtype: Cast floating-point tensors of more than 8 bits to this dtype, such as `bfloat16`.
        strip: A prefix to remove from names.
        rename: Pairs of a regular expression and its replacement, applied to names in order.
        tied: Pairs of names. The first is left out; it must equal the second, bit for bit.
        config: The `config.json` of the model: it is copied, and read for `tie_word_embeddings`.
        max_shard_bytes: The most bytes of tensors in one safetensors file.
        overwrite: Replace an earlier export, which stays until the new one takes its place.
        begin: Called with the bytes of all tensors; returns a callback for the bytes written, or None.

    Returns:
        What was written.

    Raises:
        NotFoundError: There is no checkpoint, or it was deleted or saved again meanwhile.
        CorruptError: The checkpoint is damaged.
        FormatVersionError: A newer ckptman wrote it.
        ConfigError: An option is wrong, or the format has no form for a tensor.
        ExistsError: `out` exists and is not an export that may be replaced.
        OSError: Reading or writing failed. After any error nothing is left of `out`.
    """
    if format not in get_args(Format):
        raise ConfigError(f"--format {format}: choose one of {', '.join(get_args(Format))}")
    if (config is not None or tied) and format != "safetensors":
        raise ConfigError(f"--config and --tied are for what Hugging Face loads (safetensors), not for {format}")
    if only is not None and everything:
        raise ConfigError("--only and --all exclude each other: name one of them")
    if everything and dtype is not None:
        raise ConfigError("--dtype is for weights, and --all exports optimizers and counters too: name a part (--only)")
    if dtype is not None and dtype not in CASTS:
        raise ConfigError(f"--dtype {dtype}: tensors are cast to one of {', '.join(CASTS)}")
    if max_shard_bytes < 1:
        raise ConfigError(f"--max-shard-size: a file holds at least 1 byte, not {max_shard_bytes}")
    folder, target = checkpoint_at(path), Path(os.path.abspath(out))  # noqa: PTH100 a link stays one
    allowed = partial(check_target, folder, target, format, overwrite=overwrite, has_config=config is not None)
    allowed()
    with reading(folder, what="export"), _opened(folder) as (saved, check_unchanged):
        reader, as_dtype = BoxReader(saved), CASTS[dtype] if dtype is not None else None
        choice = choose(
            saved, only, everything, excluding(exclude), renaming(rename, "--rename {0}={1}", strip), as_dtype, format
        )
        extra: list[FilePlan] = []
        if config is not None:
            copied, are_tied = config_file(Path(config))
            extra.append(copied)
            tied = [*tied, *(_usual_pair(choice, tied) if are_tied else ())]
        result = Exported(target, remarks=clear_leftovers(target))
        choice = replace(choice, items=_untied(reader, choice.items, tied, result.remarks))
        plans = [*_plans(choice, format, max_shard_bytes, target, result.remarks), *extra]
        result.tensors, result.bytes = len(choice.items), sum(item.bytes for item in choice.items)
        done = begin(result.bytes) if begin is not None else None
        DISK.make_folders(target.parent)
        draft = draft_of(target)
        try:
            if format == "torch":
                write_files(draft.parent, [replace(plan, name=draft.name) for plan in plans], reader, done)
            else:
                DISK.make_folder(draft)
                write_files(draft, plans, reader, done)
                DISK.sync_folder(draft)
            check_unchanged()
            allowed()  # somebody may have made it meanwhile
            aside = _move_in(draft, target, overwrite)
        except BaseException:
            with contextlib.suppress(OSError):
                DISK.remove_tree(draft)
            raise
    if aside is not None:
        try:
            DISK.remove_tree(aside)
        except OSError:
            result.remarks.append(f"{aside}, which was {target.name} before, could not be removed: remove it")
    result.files = {plan.name: plan.size_bytes for plan in plans}
    return result


def _plans(choice: Choice, format: Format, max_shard_bytes: int, target: Path, remarks: list[str]) -> list[FilePlan]:
    if format == "torch":
        return [torch_file(choice, target.name)]
    if format == "dcp":
        return dcp_files(choice, target)
    if choice.values:
        remarks.append(f"safetensors holds tensors alone: {len(choice.values):,} plain values were left out")
    return safetensors_files(choice, max_shard_bytes)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[tuple[SavedState, Callable[[], None]]]:
    """Read the index of a checkpoint, and yield it with a function that raises NotFoundError if the checkpoint was
    deleted or saved again since. An error that came of that becomes a NotFoundError too.

    Raises: NotFoundError, CorruptError, FormatVersionError, OSError.
    """
    stamps = _stamps(folder, (MANIFEST, METADATA))

    def check_unchanged() -> None:
        for name, now in _stamps(folder, sorted(stamps)).items():
            if now != stamps[name]:
                what = f"{name} is gone" if now is None else f"{name} was written to"
                raise NotFoundError(
                    f"{folder} was deleted, or saved again, while it was exported ({what}): nothing was made of it; "
                    f"try again, or export another checkpoint"
                )

    try:
        saved = BoundedState.read(folder)
        saved.refuse_transformed()
        if saved.manifest is None:  # the data files of ours have digests, which tell more
            stamps.pop(MANIFEST, None)  # it may be adopted meanwhile
            places = saved.index.objects.values()
            stamps |= _stamps(folder, {*saved.index.files, *(place.file for place in places)})
        yield saved, check_unchanged
    except (CorruptError, OSError) as error:
        if not isinstance(error, CkptmanError) or isinstance(error, CorruptError):
            check_unchanged()
        raise


def _stamps(folder: Path, names: Iterable[str]) -> dict[str, Stamp | None]:
    """Return what each file is known by; None where there is none. Those that cannot be looked at are left out."""
    found: dict[str, Stamp | None] = {}
    for name in names:
        try:
            found[name] = stamp_of((folder / name).stat())
        except (FileNotFoundError, NotADirectoryError):
            found[name] = None
        except OSError:
            continue
    return found


def _usual_pair(choice: Choice, tied: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the output and the input embedding, if both have their usual names and the output is not tied yet."""
    names = [item.name for item in choice.items if item.name not in dict(tied)]
    inputs = [name for name in names if name.endswith(_INPUTS)]
    return [(_OUTPUT, inputs[0])] if _OUTPUT in names and len(inputs) == 1 else []


def _untied(reader: BoxReader, items: list[Item], tied: Sequence[tuple[str, str]], remarks: list[str]) -> list[Item]:
    """Return the tensors without those that are tied to others, as Hugging Face saves them. Raises: ConfigError."""
    by_name = {item.name: item for item in items}
    for name, other in tied:
        missing = [each for each in (name, other) if each not in by_name]
        if missing or name == other:
            raise ConfigError(f"--tied {name}={other}: there is no other tensor {(missing or [other])[0]}")
        if not same_bits(reader, by_name[name], by_name[other]):
            raise ConfigError(
                f"{name} and {other} are not the same, so they are not tied: export both (without --tied; in the "
                f"config.json tie_word_embeddings is to be false)"
            )
        del by_name[name]
        remarks.append(f"{name} was left out: it is tied to {other}")
    return list(by_name.values())


def _move_in(draft: Path, target: Path, overwrite: bool) -> Path | None:
    """Rename the draft to its final name. Return where a folder that had the name stands now, or None."""
    aside = draft.with_name(f"{draft.name}{OLD}") if overwrite and target.is_dir() else None
    try:
        if aside is not None:
            DISK.rename(target, aside)
        # Refused where somebody has made a folder this very moment, and something is in it.
        DISK.rename(draft, target)
    except BaseException:
        if aside is not None:
            with contextlib.suppress(OSError):
                DISK.rename(aside, target)
        raise
    DISK.sync_folder(target.parent)
    return aside

"""`ckptman export` for other programs, and `ckptman adopt` for what they wrote."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from ckptman.cli import console
from ckptman.cli.console import progress
from ckptman.cli.options import AsJson, flag, option, parse_size, path_argument
from ckptman.cli.select import PathOrRoot, Step, choose, is_foreign
from ckptman.errors import CkptmanError, ConfigError, NotFoundError
from ckptman.storage.catalog.root_checks import check_is_folder

if TYPE_CHECKING:
    from ckptman.tools.adopt.adopt import Adopted
    from ckptman.tools.exporting.target import Format


def export(
    path: PathOrRoot,
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", show_default=False, help="What is made: a folder; a file where --format is torch."
        ),
    ],
    step: Step = None,
    format: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="safetensors, torch or dcp.")
    ] = "safetensors",
    only: Annotated[str | None, option("--only", "ENTRY", "This entry of the state, instead of model.")] = None,
    everything: Annotated[bool, flag("--all", "The whole state: optimizer, counters and all.")] = False,
    exclude: Annotated[
        list[str] | None,
        option("--exclude", "REGEX", "Leave out what has a name in which this is found. May be given several times."),
    ] = None,
    dtype: Annotated[
        str | None, option("--dtype", "DTYPE", "Cast floating-point tensors: bfloat16, float16, float32.")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="How much a file of safetensors holds at most.")
    ] = "5GB",
    strip: Annotated[str, option("--strip", "PREFIX", "Take this from the beginning of names.")] = "",
    rename: Annotated[
        list[str] | None,
        option("--rename", "FROM=TO", "Replace this regular expression in names. May be given several times."),
    ] = None,
    tied: Annotated[
        list[str] | None,
        option("--tied", "NAME=OTHER", "Leave NAME out: it is OTHER, which is checked. May be given several times."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            show_default=False,
            readable=False,
            help="The model's config.json for transformers: it is copied, and embeddings are tied as it says.",
        ),
    ] = None,
    overwrite: Annotated[bool, flag("--overwrite", "Replace an earlier export.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint, or a part of it, for other programs.

    The model alone, unless something else is asked for. OUT appears when it is whole; every block that is read is
    checked. Memory is bounded, however large the checkpoint is.
    """
    check_is_folder(out)
    most_bytes = parse_size("--max-shard-size", max_shard_size, needs_unit=True)
    renames, ties = _pairs("--rename", rename), _pairs("--tied", tied)
    folder = path
    if step is not None or not is_foreign(path):
        (entry,) = choose(path, step)
        entry.require_manifest()
        folder = entry.path

    from ckptman.tools.exporting.export import export as export_checkpoint

    with ExitStack() as stack, warnings.catch_warnings():
        # torch warns of dtypes that are experimental or deprecated wherever they are touched.
        warnings.simplefilter("ignore")

        def begin(total_bytes: int) -> Callable[[int], None] | None:
            return stack.enter_context(progress("exporting", total_bytes))

        found = export_checkpoint(
            folder,
            out,
            cast("Format", format),
            only=only,
            everything=everything,
            exclude=exclude or (),
            dtype=dtype,
            strip=strip,
            rename=renames,
            tied=ties,
            config=config,
            max_shard_bytes=most_bytes,
            overwrite=overwrite,
            begin=begin,
        )
    if as_json:
        console.say_json({"checkpoint": folder, "format": format, **vars(found)})
        return
    what = f"{console.count(found.tensors, 'tensor')}, {console.size(found.bytes)}"
    console.say(
        f"{folder} -> {out}: {what} in {console.count(len(found.files), 'file')}",
        *(f"  {remark}" for remark in found.remarks),
    )


def _pairs(option: str, written: Sequence[str] | None) -> list[tuple[str, str]]:
    pairs = []
    for each in written or []:
        name, equals, other = each.partition("=")
        if not equals or not name:
            raise ConfigError(f"{option}: two names with = between them, not {each!r}")
        pairs.append((name, other))
    return pairs


def adopt(
    path: Annotated[
        Path,
        path_argument("PATH", "A checkpoint that plain DCP or torchtitan wrote, or the folder that holds several."),
    ],
    step: Annotated[int | None, option("--step", "N", "Its step, where the name of the folder tells none.")] = None,
    keep_name: Annotated[bool, flag("--keep-name", "Leave the folder the name it has.")] = False,
    as_json: AsJson = False,
) -> None:
    """Give what plain DCP or torchtitan wrote digests and a manifest, where it is.

    No byte of its files changes. Its folder is renamed to what ckptman calls that step. What is damaged or incomplete
    is refused.
    """
    from ckptman.storage.format.foreign import foreign_in, recognize
    from ckptman.storage.format.paths import METADATA
    from ckptman.tools.adopt.adopt import adopt as adopt_checkpoint
    from ckptman.tools.adopt.adopt import candidates

    wanted = [path]
    is_dcp = (path / METADATA).exists() or any(path.glob("*.distcp"))
    if is_root := path.is_dir() and recognize(path) is None and not is_dcp:
        # Those that cannot be adopted are refused one by one, each with what to do instead.
        others = [each.path for each in foreign_in(path, os.listdir(path)) if not each.is_dcp]  # noqa: PTH208
        if not (wanted := [*candidates(path), *others]):
            raise NotFoundError(f"{path} holds nothing to adopt: no folder in it has a {METADATA} and no manifest.json")
        if step is not None:
            which = str(wanted[0]) if len(wanted) == 1 else f"one of the {len(wanted)} in it"
            raise ConfigError(f"--step is that of one checkpoint, and {path} is a folder of them: name {which}")
    adopted: list[Adopted] = []
    refused: dict[Path, CkptmanError | OSError] = {}
    for folder in wanted:
        try:
            # Each file is read twice: to compare its checksums, and for digests.
            sizes = [each.lstat().st_size for each in folder.glob("*.distcp")] if folder.is_dir() else []
            with progress(f"adopting {folder.name}", 2 * sum(sizes)) as done:
                adopted.append(adopt_checkpoint(folder, step, keep_name=keep_name, done=done))
        except (CkptmanError, OSError) as error:
            if not is_root:
                raise
            refused[folder] = error
        else:
            if not as_json:
                console.say(*_lines(folder, adopted[-1]))
    whys = {folder: console.message(error) for folder, error in refused.items()}
    if as_json:
        refusals = [{"path": each, "why": why} for each, why in whys.items()]
        console.say_json({"adopted": adopted, "refused": refusals})
    for folder, why in whys.items():
        console.complain(f"{folder} was not adopted: {why}")
    if refused:
        first = next(iter(refused.values()))
        raise typer.Exit(console.exit_code(first))


def _lines(folder: Path, found: Adopted) -> list[str]:
    what = "it had been adopted before"
    if found.files:
        checked = f"{console.size(found.checked_bytes)} have a checksum, which is right"
        what = f"{console.count(found.files, 'file')}, {console.size(found.bytes)}, of which {checked}"
    renamed = f"{folder} -> {folder.with_name(found.path.name)}"
    return [f"{renamed}: step {found.step}; {what}", *(f"  {remark}" for remark in found.remarks)]

"""`ckptman export PATH OUT`: a checkpoint for other programs: safetensors, one file of torch.save, plain DCP."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from ckptman.cli import console
from ckptman.cli.options import AsJson, option, parse_size
from ckptman.cli.progress import progress
from ckptman.cli.select import PathOrRoot, Step, choose, is_foreign
from ckptman.errors import ConfigError
from ckptman.storage.catalog.root_checks import check_is_folder

if TYPE_CHECKING:
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
    everything: Annotated[bool, typer.Option("--all", help="The whole state: optimizer, counters and all.")] = False,
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
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export.")] = False,
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
        console.say_json({"checkpoint": str(folder), "format": format, **asdict(found), "path": str(found.path)})
        return
    what = f"{console.count(found.tensors, 'tensor')}, {console.size(found.bytes)}"
    console.say(
        f"{console.plain(folder)} -> {console.plain(out)}: {what} in {console.count(len(found.files), 'file')}",
        *(f"  {console.plain(remark)}" for remark in found.remarks),
    )


def _pairs(option: str, written: Sequence[str] | None) -> list[tuple[str, str]]:
    pairs = []
    for each in written or []:
        name, equals, other = each.partition("=")
        if not equals or not name:
            raise ConfigError(f"{option}: two names with = between them, not {each!r}")
        pairs.append((name, other))
    return pairs

"""`ckptman export PATH OUT`: a checkpoint for other programs: safetensors, one file of torch.save, plain DCP."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ckptman.cli import console
from ckptman.cli.options import AsJson, option, parse_size
from ckptman.cli.progress import progress
from ckptman.cli.select import PathOrRoot, Step, check_is_folder, choose, is_foreign
from ckptman.errors import ConfigError

if TYPE_CHECKING:
    from ckptman.exporting.export import Exported
    from ckptman.exporting.target import Format

Out = Annotated[
    Path,
    typer.Argument(metavar="OUT", show_default=False, help="What is made: a folder; a file where --format is torch."),
]
FormatOption = Annotated[str, typer.Option("--format", metavar="FORMAT", help="safetensors, torch or dcp.")]
Only = Annotated[str | None, option("--only", "ENTRY", "This entry of the state, instead of model.")]
All = Annotated[bool, typer.Option("--all", help="The whole state: optimizer, counters and all.")]
Exclude = Annotated[
    list[str] | None,
    option("--exclude", "REGEX", "Leave out what has a name in which this is found. May be given several times."),
]
Dtype = Annotated[str | None, option("--dtype", "DTYPE", "Cast floating-point tensors: bfloat16, float16, float32.")]
MaxShardSize = Annotated[
    str, typer.Option("--max-shard-size", metavar="SIZE", help="How much a file of safetensors holds at most.")
]
Strip = Annotated[str, option("--strip", "PREFIX", "Take this from the beginning of names.")]
Rename = Annotated[
    list[str] | None,
    option("--rename", "FROM=TO", "Replace this regular expression in names. May be given several times."),
]
Tied = Annotated[
    list[str] | None,
    option("--tied", "NAME=OTHER", "Leave NAME out: it is OTHER, which is checked. May be given several times."),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        show_default=False,
        readable=False,
        help="The model's config.json for transformers: it is copied, and embeddings are tied as it says.",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export.")]


def export(
    path: PathOrRoot,
    out: Out,
    step: Step = None,
    format: FormatOption = "safetensors",
    only: Only = None,
    everything: All = False,
    exclude: Exclude = None,
    dtype: Dtype = None,
    max_shard_size: MaxShardSize = "5GB",
    strip: Strip = "",
    rename: Rename = None,
    tied: Tied = None,
    config: Config = None,
    overwrite: Overwrite = False,
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

    from ckptman.exporting.export import export as export_checkpoint

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
        console.say_json(_as_dict(folder, found, format))
    else:
        console.say(*_lines(folder, out, found))


def _pairs(option: str, written: Sequence[str] | None) -> list[tuple[str, str]]:
    pairs = []
    for each in written or []:
        name, equals, other = each.partition("=")
        if not equals or not name:
            raise ConfigError(f"{option}: two names with = between them, not {each!r}")
        pairs.append((name, other))
    return pairs


def _lines(folder: Path, out: Path, found: Exported) -> list[str]:
    what = f"{console.count(found.tensors, 'tensor')}, {console.size(found.bytes)}"
    lines = [f"{console.plain(folder)} -> {console.plain(out)}: {what} in {console.count(len(found.files), 'file')}"]
    return [*lines, *(f"  {console.plain(remark)}" for remark in found.remarks)]


def _as_dict(folder: Path, found: Exported, format: str) -> dict[str, Any]:
    return {
        "checkpoint": str(folder),
        "path": str(found.path),
        "format": format,
        "tensors": found.tensors,
        "bytes": found.bytes,
        "files": found.files,
        "remarks": found.remarks,
    }

"""`ckptman adopt PATH`: what plain DCP or torchtitan wrote becomes a checkpoint of ckptman, where it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptman.cli import console
from ckptman.cli.options import AsJson, option, path_argument
from ckptman.cli.progress import progress
from ckptman.errors import CkptmanError, ConfigError, NotFoundError

if TYPE_CHECKING:
    from ckptman.tools.adopt.adopt import Adopted


def adopt(
    path: Annotated[
        Path,
        path_argument("PATH", "A checkpoint that plain DCP or torchtitan wrote, or the folder that holds several."),
    ],
    step: Annotated[int | None, option("--step", "N", "Its step, where the name of the folder tells none.")] = None,
    keep_name: Annotated[bool, typer.Option("--keep-name", help="Leave the folder the name it has.")] = False,
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
    renamed = f"{console.plain(folder)} -> {console.plain(folder.with_name(found.path.name))}"
    return [f"{renamed}: step {found.step}; {what}", *(f"  {console.plain(remark)}" for remark in found.remarks)]

"""OUT of an export: what may be replaced, the name that it has until it is whole, and what killed exports left.

An export is known by a mark that its readers ignore, and that a file which somebody else writes in its place has not:
an entry in the metadata of safetensors, the comment of the zip archive of `torch.save`, the save id in `.metadata`.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from pathlib import Path
from typing import Literal

from xxhash import xxh3_64_hexdigest

from ckptman.errors import ConfigError, CorruptError, ExistsError
from ckptman.storage.catalog.liveness import Owner, process_lives, this_process
from ckptman.storage.format.paths import MANIFEST, METADATA, data_name, parse_step
from ckptman.storage.format.safetensors import INDEX_NAME, has_mark, is_file_name
from ckptman.storage.io.durable_files import DISK
from ckptman.storage.io.safe_open import open_regular

Format = Literal["safetensors", "torch", "dcp"]
CONFIG = "config.json"
_SAVE_ID = re.compile(rb"ckptman-export-[0-9a-f]{16}")
_SAVE_ID_BYTES = 1024
"""The description of an export has its save id that near to its end; those of others may have gigabytes."""
_COMMENT = b"ckptman export"
_COMMENTED = struct.pack("<H", len(_COMMENT)) + _COMMENT
_ZIP_END = b"PK\5\6"
_ZIP_END_BYTES = 22
OLD = ".old"
"""Ends the name under which an earlier export stands while the draft takes its name."""
_TAG = re.compile(rf"(?P<pid>[0-9]+)-(?P<host>[0-9a-f]{{8}})-(?P<ticks>[0-9]+)-[0-9a-f]{{8}}(?P<old>{OLD})?", re.ASCII)


def check_target(folder: Path, target: Path, format: Format, *, overwrite: bool, has_config: bool) -> None:
    """Check that an export may be written to `target`. `has_config`: it comes with a `config.json`.

    Raises: ConfigError, ExistsError, OSError.
    """
    if Path(os.path.realpath(target)).is_relative_to(os.path.realpath(folder)):
        raise ConfigError(f"{target} is within the checkpoint {folder}, to which nothing is added: name another path")
    if parse_step(target.name):
        raise ConfigError(f"{target.name} is the name of a checkpoint of ckptman, which an export is not: name another")
    if not os.path.lexists(target):
        if format != "torch" and target.suffix in (".pt", ".pth"):
            raise ConfigError(
                f"{target} is named like a file, and --format {format} writes a folder: say --format torch, or name a "
                f"folder"
            )
        return
    if not overwrite:
        raise ExistsError(f"{target} exists already: name another path, or say --overwrite (overwrite=True)")
    other = _not_ours(target, format)
    if other is not None:
        raise ExistsError(f"{target} {other}, so it is not replaced: name another path, or move it away")
    config = target / CONFIG
    if format == "safetensors" and config.exists() and not has_config:
        raise ExistsError(f"{config} would be lost: keep it by --config {config}, or name another path")


def save_id() -> str:
    """Return a save id by which the `.metadata` of an export is known."""
    return f"ckptman-export-{os.urandom(8).hex()}"


def commented(end: bytes) -> bytes:
    """Return the last bytes of a zip archive without a comment with that of an export."""
    assert end.endswith(b"\0\0")  # the length of the comment that there is not
    return end[:-2] + _COMMENTED


def _not_ours(target: Path, format: Format) -> str | None:
    """Return why a path is not an export of this format; None if it is one, or an empty folder."""
    if format == "torch":
        if target.is_symlink() or not target.is_file():
            return "is not a file"
        end = _end_of(target, _ZIP_END_BYTES + len(_COMMENT))
        is_ours = end.startswith(_ZIP_END) and end.endswith(_COMMENTED)
        return None if is_ours else "is a file that no export wrote"
    if target.is_symlink() or not target.is_dir():
        return "is not a folder"
    names = sorted(os.listdir(target))  # noqa: PTH208 names alone are wanted
    if MANIFEST in names:
        return "is a checkpoint"
    marked = [name for name in names if _is_marked(target / name, format)]
    beside = {data_name(0)} if format == "dcp" else {INDEX_NAME, CONFIG}
    others = [name for name in names if name not in marked and not (marked and name in beside)]
    return f"holds {others[0]}, which no export wrote" if others else None


def _is_marked(path: Path, format: Format) -> bool:
    """Whether a file of a folder carries the mark of an export. Raises: OSError."""
    if format == "dcp":
        return path.name == METADATA and _SAVE_ID.search(_end_of(path, _SAVE_ID_BYTES)) is not None
    with contextlib.suppress(CorruptError):  # no regular file
        return is_file_name(path.name) and has_mark(path)
    return False


def _end_of(path: Path, size: int) -> bytes:
    """Return the last bytes of a file; none if it is not a regular file. Raises: OSError."""
    try:
        fd = open_regular(path)
    except CorruptError:
        return b""
    try:
        return os.pread(fd, size, max(os.fstat(fd).st_size - size, 0))
    finally:
        os.close(fd)


def draft_of(target: Path) -> Path:
    """Return an unused name beside the target that tells which process uses it."""
    me = this_process("", None)
    return target.with_name(f"{target.name}.tmp-{me.pid}-{_host(me)}-{me.start_ticks}-{me.nonce}")


def clear_leftovers(target: Path) -> list[str]:
    """Remove what killed exports to the same target left, and return what to tell about it.

    What may belong to a running export stays, and so does an earlier export that has no successor; both are named.
    """
    told = []
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = sorted(each.name for each in target.parent.iterdir() if each.name.startswith(f"{target.name}.tmp-"))
    for name in names:
        path, tag = target.with_name(name), _TAG.fullmatch(name.removeprefix(f"{target.name}.tmp-"))
        if tag is None or not _is_dead(tag):
            told.append(f"{path} is of another export: remove it, unless that still runs")
        elif tag["old"] and not (target.is_dir() and any(target.iterdir())):
            told.append(f"{path} is what {target.name} was before an export that was killed: remove it")
        else:
            try:
                DISK.remove_tree(path)
                told.append(f"{name}, which an export left that was killed, was removed")
            except OSError as error:
                told.append(f"{path}, which an export left that was killed, could not be removed ({error}): remove it")
    return told


def _is_dead(tag: re.Match[str]) -> bool:
    """Whether the process that a name tells of is known to be gone."""
    me = this_process("", None)
    with contextlib.suppress(ValueError):  # a number that is no pid
        other = Owner(**(me.model_dump() | {"pid": int(tag["pid"]), "start_ticks": int(tag["ticks"])}))
        return tag["host"] == _host(me) and process_lives(other) is False
    return False


def _host(me: Owner) -> str:
    return xxh3_64_hexdigest(f"{me.host}\n{me.host_key}".encode())[:8]

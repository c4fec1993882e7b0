"""What can be proved of a checkpoint that plain DCP or torchtitan wrote: no more than it says of itself.

Its description is readable without running code, every tensor is saved exactly once, every container lies inside its
file and opens as the zip archive that it is. DCP keeps no digests, but torch.save may have put a checksum (CRC-32) on
each record of an archive: where it did, they are compared. A field of 0 says that it did not.
"""

from __future__ import annotations

import errno
import io
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ckptman._torch_compat import read_zip
from ckptman.errors import CorruptError
from ckptman.format.index import Index
from ckptman.format.paths import METADATA
from ckptman.format.torch_zip import LOCAL_HEADER_BYTES, PartOfFile, data_start, records
from ckptman.integrity.table_check import check_table
from ckptman.io.failure_cause import UNREADABLE
from ckptman.io.safe_open import open_regular
from ckptman.loading.checkpoint_reader import SavedState, size_of
from ckptman.loading.restricted_unpickler import read_foreign_metadata, transforms_in

_READ_BYTES = 1024 * 1024
_NAME_BYTES = 65535
_OF_THE_BYTES = (None, errno.ENOENT, *UNREADABLE)
"""Errors that say something about the bytes; any other says that they could not be looked at. None: of an archive that
points outside of itself."""


@dataclass
class ForeignReport:
    """What was found. `checked_bytes` of `bytes` in files have a checksum that is right; `problems`: damage;
    `unread`: files of which nothing was proved, for reasons that say nothing about their bytes (permissions);
    `remarks`: what could not be proved, and why."""

    files: int = 0
    bytes: int = 0
    tensors: int = 0
    checked_bytes: int = 0
    problems: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


class Container(NamedTuple):
    """A range of bytes of a file that is to be a file of torch.save, and what is in it."""

    file: str
    offset: int
    bytes: int
    what: str


@dataclass
class Opened:
    """A container that was read: bytes of records with a checksum, which is right, and with none; payloads and the rest
    apart. `problem`: what is damaged. `unread`: why it could not be looked at."""

    where: Container
    problem: str | None = None
    unread: str | None = None
    right: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    bare: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})


def check_foreign(
    folder: Path, threads: int = 2, done: Callable[[int], None] | None = None, *, open_containers: bool = True
) -> ForeignReport:
    """Look at everything that a foreign checkpoint says of itself. `done` is told the bytes that were read, from
    several threads. `open_containers`: read its data files too, not only its description.

    Raises: CorruptError (it cannot be read at all), OSError.
    """
    state = SavedState.read(folder)
    index = state.index
    sizes = {name: size_of(folder / name) for name in (*index.files, *(at.file for at in index.objects.values()))}
    report = ForeignReport(
        files=1 + len(sizes),
        bytes=sum(max(size, 0) for size in (*sizes.values(), size_of(folder / METADATA))),
        tensors=len(index.tensors),
    )
    report.problems = [f"{name} is missing" for name, size in sizes.items() if size < 0]
    if not report.problems:
        report.problems += check_table(state.table, index, [(name, sizes[name]) for name in index.files])
        report.problems += _outside(index, sizes)
    if not open_containers:
        report.remarks.append("containers were not opened: changed bytes cannot be found")
    elif not report.problems:
        _open_all(state, report, threads, done)
    return report


def _open_all(state: SavedState, report: ForeignReport, threads: int, done: Callable[[int], None] | None) -> None:
    def look(where: Container) -> Opened:
        opened = open_container(state.folder, where)
        if done is not None:
            done(where.bytes)
        return opened

    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(look, _containers(state)))
    broken = [each for each in found if each.problem]
    unopened = transformed(state.folder) if broken else set()
    closed = [each for each in broken if each.where[:3] in unopened]
    if closed:
        report.remarks.append(
            f"{len(closed)} of {len(found)} containers were transformed, such as compressed: nobody looked inside"
        )
    report.problems += [f"{_named(each.where)} {each.problem}" for each in broken if each.where[:3] not in unopened]
    report.unread = sorted({each.unread for each in found if each.unread})
    good = [each for each in found if not each.problem and not each.unread]
    for payload, kind in ((True, "the elements of tensors"), (False, "descriptions and plain values")):
        right, bare = (sum(getattr(each, which)[payload] for each in good) for which in ("right", "bare"))
        report.checked_bytes += right
        if bare:
            report.remarks.append(
                f"{bare:,} of {right + bare:,} bytes of {kind} have no checksum: changed ones cannot be found there"
            )


def open_container(folder: Path, where: Container) -> Opened:
    """Read a container from end to end as the zip archive that torch.save writes, and compare its checksums."""
    opened = Opened(where)
    try:
        with open(open_regular(folder / where.file, follow=True), "rb", buffering=0) as file:
            part = partial(PartOfFile, file.fileno(), where.offset, where.bytes)
            # torch is stricter than zipfile about some fields. Neither reads more than the directory.
            read_zip(part())
            found = records(io.BufferedReader(part()))
            if "data.pkl" not in {_inner(record) for record in found}:
                raise ValueError("it describes no value")
            if sum(record.file_size for record in found) > where.bytes:
                raise ValueError("its records hold more than it does")
            for record in found:
                _check_record(file, where, record, opened)
    except CorruptError as error:
        opened.problem = str(error)
    except (zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        opened.problem = f"is no container that torch.load reads: {str(error).partition('. ')[0][:200]}"
    except OSError as error:
        if error.errno in _OF_THE_BYTES:
            opened.problem = f"cannot be read: {error.strerror or error}"
        else:
            opened.unread = f"{where.file} cannot be read: {error.strerror or error}"
    return opened


def _check_record(file: io.FileIO, where: Container, record: zipfile.ZipInfo, opened: Opened) -> None:
    if record.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{record.filename[:80]} is compressed, which torch.save never does")
    if not 0 <= record.header_offset < where.bytes:
        raise ValueError(f"{record.filename[:80]} lies outside of it")
    header = os.pread(file.fileno(), LOCAL_HEADER_BYTES + _NAME_BYTES, where.offset + record.header_offset)
    name = header[LOCAL_HEADER_BYTES : LOCAL_HEADER_BYTES + int.from_bytes(header[26:28], "little")]
    if header[:4] != b"PK\x03\x04" or name != record.orig_filename.encode("utf-8", "replace"):
        raise ValueError(f"{record.filename[:80]} does not begin where its archive says")
    at = record.header_offset + data_start(header)
    end = at + record.file_size
    if end > where.bytes:
        raise ValueError(f"{record.filename[:80]} lies outside of it")
    checksum = 0
    while at < end:
        data = os.pread(file.fileno(), min(_READ_BYTES, end - at), where.offset + at)
        if not data:
            raise ValueError("the file ends before it does")
        checksum = zlib.crc32(data, checksum)
        at += len(data)
    is_payload = _inner(record).startswith("data/")
    if checksum == record.CRC:
        opened.right[is_payload] += record.file_size
    elif not record.CRC:
        opened.bare[is_payload] += record.file_size
    else:
        opened.problem = "does not match its checksum: its bytes have changed since they were saved"


def _inner(record: zipfile.ZipInfo) -> str:
    """The name of a record below the folder that all of them are in."""
    return record.filename.partition("/")[2]


def _containers(state: SavedState) -> Iterator[Container]:
    for name in state.index.tensors:
        for chunk in state.all_chunks(name):
            yield Container(chunk.file, chunk.offset, chunk.bytes, name)
    for name, at in state.index.objects.items():
        yield Container(at.file, at.offset, at.bytes, f"the value {name}")


def _outside(index: Index, sizes: dict[str, int]) -> Iterator[str]:
    """Plain values that lie outside of their files."""
    for name, at in index.objects.items():
        if at.offset < 0 or at.bytes < 0 or at.offset + at.bytes > sizes[at.file]:
            yield f"the value {name} is to be {at.bytes} bytes at {at.offset} of {at.file}, which has {sizes[at.file]}"


def transformed(folder: Path) -> set[tuple[str, int, int]]:
    """File, offset and bytes of the containers that were not left as torch.save made them (DCP's stream extensions)."""
    return {*transforms_in(read_foreign_metadata(folder / METADATA))}


def _named(where: Container) -> str:
    return f"{where.file}: the container of {where.what} ({where.bytes} bytes at {where.offset})"

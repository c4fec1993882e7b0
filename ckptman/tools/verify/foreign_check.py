"""What can be proved of a checkpoint that plain DCP or torchtitan wrote: no more than it says of itself.

Its description is readable without running code, every tensor is saved exactly once, every container lies inside its
file and opens as the zip archive that it is. DCP keeps no digests, but torch.save may have put a checksum (CRC-32) on
each record of an archive: where it did, they are compared. A field of 0 says that it did not.
"""

from __future__ import annotations

import errno
import io
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ckptman._torch_compat import read_zip
from ckptman.engine.loading.checkpoint_reader import SavedState, size_of
from ckptman.engine.loading.restricted_unpickler import transforms_in
from ckptman.errors import CorruptError
from ckptman.storage.format.paths import METADATA
from ckptman.storage.format.torch_zip import LOCAL_HEADER_BYTES, PartOfFile, data_at, records
from ckptman.storage.integrity.folder_check import check_table
from ckptman.storage.io.failure_cause import UNREADABLE
from ckptman.storage.io.safe_open import open_regular

_READ_BYTES = 1024 * 1024
_OF_THE_BYTES = (None, errno.ENOENT, *UNREADABLE)
"""Errors that say something about the bytes; any other says that they could not be looked at. None: of an archive that
points outside of itself."""


@dataclass
class ForeignReport:
    """What was found. `checked_bytes` of `bytes` have a correct checksum. `problems`: damage. `unread`: files of
    which nothing was proved, for reasons that say nothing about their bytes (permissions). `remarks`: what could
    not be proved, and why."""

    files: int = 0
    bytes: int = 0
    tensors: int = 0
    checked_bytes: int = 0
    problems: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


class Container(NamedTuple):
    """A range of bytes of a file that should be a file of torch.save, and what is in it."""

    file: str
    offset: int
    bytes: int
    what: str


@dataclass
class Opened:
    """A container that was read. `problem`: what is damaged. `unread`: why it could not be read. `right`, `bare`:
    bytes of records with a correct checksum, and with none; those of payloads under True."""

    where: Container
    problem: str | None = None
    unread: str | None = None
    right: Counter[bool] = field(default_factory=Counter)
    bare: Counter[bool] = field(default_factory=Counter)


def check_foreign(
    folder: Path, threads: int = 2, done: Callable[[int], None] | None = None, *, open_containers: bool = True
) -> ForeignReport:
    """Check everything that a foreign checkpoint says of itself.

    `done` is called with the bytes that were read, from several threads. `open_containers`: read its data files too,
    not only its description.

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
        report.problems += [
            f"the value {name} is to be {at.bytes} bytes at {at.offset} of {at.file}, which has {sizes[at.file]}"
            for name, at in index.objects.items()
            if at.offset < 0 or at.bytes < 0 or at.offset + at.bytes > sizes[at.file]
        ]
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
    assert state.described is not None
    unopened = transforms_in(state.described)
    problems = [
        f"{at.file}: the container of {at.what} ({at.bytes} bytes at {at.offset}) {each.problem}"
        for each in broken
        for at in [each.where]
        if at[:3] not in unopened
    ]
    if closed := len(broken) - len(problems):
        report.remarks.append(
            f"{closed} of {len(found)} containers were transformed, such as compressed: nobody looked inside"
        )
    report.problems += problems
    account_for(report, found)


def account_for(report: ForeignReport, found: Sequence[Opened]) -> None:
    """Add to a report what of containers could not be read, and which of their bytes have a checksum."""
    report.unread += sorted({each.unread for each in found if each.unread})
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
            archive = io.BufferedReader(PartOfFile(file.fileno(), where.offset, where.bytes))
            found = records(archive)
            # torch is stricter than zipfile about some fields. It hides why it could not read, so it comes second.
            read_zip(PartOfFile(file.fileno(), where.offset, where.bytes))
            if "data.pkl" not in {_inner(record) for record in found}:
                raise ValueError("it describes no value")
            if sum(record.file_size for record in found) > where.bytes:
                raise ValueError("its records hold more than it does")
            for record in found:
                _check_record(archive, record, opened)
    except CorruptError as error:
        opened.problem = str(error)
    except (EOFError, ValueError, RuntimeError) as error:
        opened.problem = f"is not a container that torch.load reads: {str(error).partition('. ')[0][:200]}"
    except OSError as error:
        if error.errno in _OF_THE_BYTES:
            opened.problem = f"cannot be read: {error.strerror or error}"
        else:
            opened.unread = f"{where.file} cannot be read: {error.strerror or error}"
    return opened


def _check_record(archive: BinaryIO, record: zipfile.ZipInfo, opened: Opened) -> None:
    if record.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{record.filename[:80]} is compressed, which torch.save never does")
    begins, name = data_at(archive, record), record.orig_filename.encode("utf-8", "replace")
    archive.seek(record.header_offset + LOCAL_HEADER_BYTES)  # the name, of which there is no checksum
    if archive.read(len(name)) != name:
        raise ValueError(f"{record.filename[:80]} has another name where it begins")
    archive.seek(begins)
    checksum, left = 0, record.file_size
    while left:
        data = archive.read(min(_READ_BYTES, left))
        if not data:
            raise ValueError(f"it ends within {record.filename[:80]}")
        checksum = zlib.crc32(data, checksum)
        left -= len(data)
    is_payload = _inner(record).startswith("data/")
    if checksum == record.CRC:
        opened.right[is_payload] += record.file_size
    elif not record.CRC:
        opened.bare[is_payload] += record.file_size
    else:
        opened.problem = "does not match its checksum: its bytes have changed since they were saved"


def _inner(record: zipfile.ZipInfo) -> str:
    """Return the name of a record below the folder that all of them are in."""
    return record.filename.partition("/")[2]


def _containers(state: SavedState) -> Iterator[Container]:
    for name in state.index.tensors:
        for chunk in state.all_chunks(name):
            yield Container(chunk.file, chunk.offset, chunk.bytes, name)
    for name, at in state.index.objects.items():
        yield Container(at.file, at.offset, at.bytes, f"the value {name}")

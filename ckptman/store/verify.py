"""Proving that the bytes of a checkpoint are the bytes that were saved. Torch-free, parallel over files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ckptman.errors import CorruptError
from ckptman.store.catalogue import Entry
from ckptman.store.coverage import first_flaw, flaw_of
from ckptman.store.digest import digest_file, digest_of_blocks
from ckptman.store.index import data_files, open_table, read_blocks, read_index
from ckptman.store.manifest import FileRecord, Manifest


@dataclass(frozen=True)
class FileReport:
    """The outcome for one checkpoint: bytes read and, for each bad file, what is wrong with it."""

    files: int
    bytes: int
    problems: tuple[str, ...]

    @property
    def good(self) -> bool:
        return not self.problems


def check_file(folder: Path, name: str, record: FileRecord, block_bytes: int) -> str | None:
    """Read one file and say what is wrong with it, or None."""
    try:
        size, blocks = digest_file(folder / name, block_bytes)
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"
    if size != record.bytes:
        return f"{name} has {size} bytes instead of {record.bytes}"
    if digest_of_blocks(blocks) != record.digest:
        return f"{name} does not match its digest: its bytes have changed since they were saved"
    return None


def verify_files(
    entry: Entry, names: Iterable[str] | None = None, threads: int = 2, done: Callable[[int], None] | None = None
) -> FileReport:
    """Check every byte of an entry, or of the files named. `done` is told the bytes of each file that was read.

    Raises: CorruptError, FormatVersionError where the entry is not complete to begin with.
    """
    manifest = entry.require_manifest()
    chosen = sorted(manifest.files) if names is None else list(names)

    def check(name: str) -> str | None:
        problem = check_file(entry.path, name, manifest.files[name], manifest.block_bytes)
        if done is not None:
            done(manifest.files[name].bytes)
        return problem

    with ThreadPoolExecutor(threads) as pool:
        problems = [problem for problem in pool.map(check, chosen) if problem]
    return FileReport(len(chosen), sum(manifest.files[name].bytes for name in chosen), tuple(problems))


def check_coverage(folder: Path, manifest: Manifest) -> list[str]:
    """What is wrong with how the chunks of each tensor fill it: each element is to be saved exactly once.

    What a load needs besides, the digests of every data file's blocks, has to be there too.

    Raises: CorruptError where the index cannot be read.
    """
    problems = []
    index = read_index(folder, manifest)
    files = data_files(manifest, index)
    table = open_table(folder, manifest, index)
    table.check(files)
    for name, tensor in index.tensors.items():
        chunks = table.chunks(name)
        if flaw_of(chunks.offsets, chunks.sizes, tensor.shape) is None:
            continue
        flaw = first_flaw(chunks.boxes(), tensor.shape)
        if flaw is not None:
            where, times = flaw
            problems.append(f"{name} {list(tensor.shape)}: element {list(where)} was saved {times} times, not once")
    for name, size in files:
        try:
            if size >= 0:
                read_blocks(folder, name, manifest)
        except CorruptError as error:
            problems.append(str(error))
    return problems

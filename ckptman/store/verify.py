"""Proving that the bytes of a checkpoint are the bytes that were saved. Torch-free, parallel over files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ckptman.store.catalogue import Entry
from ckptman.store.digest import digest_file, digest_of_blocks
from ckptman.store.index import read_index
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
        return f"{name} cannot be read: {error.strerror}"
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
    """Tensors whose chunks do not add up to the whole tensor. Raises: CorruptError where the index cannot be read."""
    problems = []
    for name, tensor in read_index(folder, manifest).tensors.items():
        wanted = _volume(tensor.shape)
        saved = sum(_volume(chunk.sizes) for chunk in tensor.chunks)
        if saved != wanted:
            problems.append(f"{name} has {saved} of its {wanted} elements")
    return problems


def _volume(shape: tuple[int, ...]) -> int:
    volume = 1
    for size in shape:
        volume *= size
    return volume

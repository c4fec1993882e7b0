"""Copies of parts on other nodes: each rank sends its data file to the ranks that keep one, and checks what it gets."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from ckptman.comm.control_group import Channel
from ckptman.errors import CorruptError
from ckptman.format.manifest import Manifest
from ckptman.format.paths import blocks_name, data_name, new_nonce
from ckptman.io.checksums import BLOCK_BYTES, DIGEST_BYTES, digests_bytes
from ckptman.io.durable_files import Disk
from ckptman.io.writer_process import shared_memory
from ckptman.state.file_layout import view_of

PIECE_BYTES = 16 * 1024 * 1024
"""What is under way between two ranks at a time: whole blocks."""


class _Kept:
    """A file in memory that a part of another rank is received in."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.path = folder / f"peer-{new_nonce()}"
        memory, _ = shared_memory(size_bytes, self.path)
        self.data = torch.frombuffer(memory, dtype=torch.uint8)
        self.step: int | None = None
        """The checkpoint that it is part of; None: it may be written to."""


class PartExchange:
    """Sends this rank's part, and receives those that it keeps. Every rank has one, and calls it alike.

    Args:
        slots: folder of this node in memory.
        receivers: for each rank those that keep a copy of its part.
    """

    def __init__(self, channel: Channel, slots: Path, receivers: Sequence[Sequence[int]], disk: Disk) -> None:
        self._channel, self._slots, self._disk = channel, slots, disk
        self._to = tuple(receivers[channel.rank])
        self._from = tuple(rank for rank, peers in enumerate(receivers) if channel.rank in peers)
        self._any = any(receivers)
        self._files: list[_Kept] = []

    def needs_bytes(self, part_bytes: Sequence[int]) -> int:
        """Return the memory that copies of others take here, where ranks have parts of these sizes: that of the newest
        checkpoint and of the one that is on its way."""
        return 2 * sum(part_bytes[rank] for rank in self._from)

    def run(self, folder: Path, manifest: Manifest, wait: Callable[[float], None]) -> None:
        """Exchange the parts of a checkpoint, of which `folder` has this node's.

        `wait`: called after each round with the seconds that it took. Raises: CorruptError, OSError, RankLostError.
        """
        if not self._any:
            return
        sizes = [_size(manifest, data_name(rank)) for rank in range(self._channel.world_size)]
        digests = self._exchange_digests(folder, manifest, sizes)
        mine = mapped(folder / data_name(self._channel.rank), sizes[self._channel.rank])
        kept = {rank: self._file_for(sizes[rank], manifest.step) for rank in self._from if sizes[rank]}
        try:
            wrong: list[int] = []
            received: dict[int, tuple[int, torch.Tensor]] = {}
            for begin in range(0, max(sizes, default=0), PIECE_BYTES):
                began = time.monotonic()
                sent = {rank: mine[begin : begin + PIECE_BYTES] for rank in self._to if begin < len(mine)}
                places = {
                    rank: file.data[begin : min(begin + PIECE_BYTES, sizes[rank])]
                    for rank, file in kept.items()
                    if begin < sizes[rank]
                }
                arrived = self._channel.begin_exchange(sent, places)
                wrong += _differing(received, digests)  # of the round before, while this one is under way
                arrived()
                received = {rank: (begin, data) for rank, data in places.items()}
                wait(time.monotonic() - began)
            wrong += _differing(received, digests)
            if wrong:
                raise CorruptError(f"the part of rank {wrong[0]} arrived with other bytes than it was sent with")
            for rank, file in kept.items():
                self._disk.link(file.path, folder / data_name(rank))
        except BaseException:
            for file in kept.values():
                file.step = None
            raise

    def keep_only(self, step: int | None) -> None:
        """Give up what was received of other checkpoints than that of `step`: their folders are gone."""
        for file in self._files:
            if file.step != step:
                file.step = None

    def close(self) -> None:
        """Give up the memory. Its names are gone with the folder, or are part of a checkpoint."""
        for file in self._files:
            with contextlib.suppress(OSError):
                self._disk.remove_file(file.path)
        self._files = []

    def _exchange_digests(self, folder: Path, manifest: Manifest, sizes: Sequence[int]) -> Mapping[int, bytes]:
        """Have the digests of the parts that are kept here, as files beside them. Raises: CorruptError, OSError."""
        rank = self._channel.rank
        own = (folder / blocks_name(rank)).read_bytes() if sizes[rank] else b""
        data = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else None
        wanted = {each: digests_bytes(sizes[each], BLOCK_BYTES) for each in self._from if sizes[each]}
        received = {each: torch.empty(size, dtype=torch.uint8, device="cpu") for each, size in wanted.items()}
        self._channel.begin_exchange(dict.fromkeys(self._to, data) if data is not None else {}, received)()
        found = {each: tensor.numpy().tobytes() for each, tensor in received.items()}
        for each, digests in found.items():
            if xxh3_128_hexdigest(digests) != manifest.files[data_name(each)].digest:
                raise CorruptError(f"the digests of rank {each} arrived with other bytes than they were sent with")
            self._disk.write_file(folder / blocks_name(each), digests)
        return found

    def _file_for(self, size_bytes: int, step: int) -> _Kept:
        """Return memory that has been used before, where there is some of that size. Raises: OSError."""
        file = next((each for each in self._files if each.step is None and len(each.data) == size_bytes), None)
        if file is None:
            for each in [each for each in self._files if each.step is None]:
                self._disk.remove_file(each.path)
                self._files.remove(each)
            file = _Kept(self._slots, size_bytes)
            self._files.append(file)
        file.step = step
        return file


def _size(manifest: Manifest, name: str) -> int:
    record = manifest.files.get(name)
    return record.bytes if record is not None else 0


def mapped(path: Path, size_bytes: int) -> torch.Tensor:
    """Return the bytes of a file in memory, not copied. Raises: OSError."""
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(fd).st_size != size_bytes:
            raise OSError(errno.EIO, "it has another size than was written", str(path))
        return torch.frombuffer(mmap.mmap(fd, size_bytes), dtype=torch.uint8)
    finally:
        os.close(fd)


def _differing(received: Mapping[int, tuple[int, torch.Tensor]], digests: Mapping[int, bytes]) -> list[int]:
    """Return the ranks whose piece has a block that does not match its digest."""
    return [rank for rank, (begin, data) in received.items() if not _matches(begin, data, digests[rank])]


def _matches(begin: int, data: torch.Tensor, digests: bytes) -> bool:
    view, at = view_of(data), begin // BLOCK_BYTES * DIGEST_BYTES
    return all(
        xxh3_128_digest(view[low : low + BLOCK_BYTES]) == digests[at + number * DIGEST_BYTES :][:DIGEST_BYTES]
        for number, low in enumerate(range(0, len(view), BLOCK_BYTES))
    )

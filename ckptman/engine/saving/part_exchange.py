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
from xxhash import xxh3_128_digest

from ckptman.engine.comm.control_group import Channel
from ckptman.engine.state.file_layout import view_of
from ckptman.errors import CorruptError
from ckptman.storage.format.manifest import Manifest
from ckptman.storage.format.paths import blocks_name, data_name, new_nonce
from ckptman.storage.io.checksums import BLOCK_BYTES, DIGEST_BYTES, digest_bytes
from ckptman.storage.io.durable_files import DISK
from ckptman.storage.io.writer_process import shared_memory

PIECE_BYTES = 16 * 1024 * 1024
"""What is under way between two ranks at a time: whole blocks."""
_MAPPED = 3
"""As many slots as there are."""


class _Kept:
    """A file in memory that a part of another rank is received in."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.path = folder / f"peer-{new_nonce()}"
        self.data = torch.empty(0, dtype=torch.uint8, device="cpu")
        if size_bytes:
            memory, self.fd = shared_memory(size_bytes, self.path)
            self.data = torch.frombuffer(memory, dtype=torch.uint8)
        self.digests = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.step: int | None = None
        """The checkpoint that it is part of; None: it may be written to."""


class _Parts:
    """What the ranks' data files are, by rank."""

    def __init__(self, manifest: Manifest, world_size: int) -> None:
        self._files = manifest.files
        records = (manifest.files.get(data_name(rank)) for rank in range(world_size))
        self.sizes = [record.bytes if record is not None else 0 for record in records]

    def digests_bytes(self, rank: int) -> int:
        """Return the size of the file of the digests of a part."""
        return self._files[blocks_name(rank)].bytes if self.sizes[rank] else 0

    def are_digests(self, rank: int, digests: torch.Tensor) -> bool:
        """Return whether this is the file of the digests of a part."""
        return not len(digests) or digest_bytes(view_of(digests)) == self._files[blocks_name(rank)].digest


class PartExchange:
    """Sends this rank's part, and receives those that it keeps. Every rank has one, and calls it alike.

    Args:
        slots: folder of this node in memory.
        receivers: for each rank those that keep a copy of its part.
        durable: flush what is received, which goes to a disk.
    """

    def __init__(
        self, channel: Channel, slots: Path, receivers: Sequence[Sequence[int]], *, durable: bool = False
    ) -> None:
        self._durable = durable
        self._channel, self._slots = channel, slots
        self._to = tuple(receivers[channel.rank])
        self._from = tuple(rank for rank, peers in enumerate(receivers) if channel.rank in peers)
        self._files: list[_Kept] = []
        self._slots_mapped: dict[tuple[int, int], torch.Tensor] = {}

    def needs_bytes(self, part_bytes: Sequence[int]) -> int:
        """Return the memory that copies of others take here, where ranks have parts of these sizes: that of the newest
        checkpoint and of the one that is on its way."""
        return 2 * sum(part_bytes[rank] for rank in self._from)

    def run(self, folder: Path, manifest: Manifest, wait: Callable[[float], None]) -> None:
        """Exchange the parts of a checkpoint, of which `folder` has this node's.

        `wait`: called after each round with the seconds that it took. Raises on every rank alike: RankFailed;
        RankLostError.
        """
        rank, parts = self._channel.rank, _Parts(manifest, self._channel.world_size)
        sends = self._to if parts.sizes[rank] else ()
        kept: dict[int, _Kept] = {}
        mine: list[torch.Tensor] = []

        def prepare() -> None:  # whoever cannot leaves nobody waiting
            kept.update({each: self._file_for(parts.sizes[each], manifest.step) for each in self._from})
            if sends:
                digests = torch.frombuffer(bytearray((folder / blocks_name(rank)).read_bytes()), dtype=torch.uint8)
                mine.extend((digests, self._own(folder / data_name(rank), parts.sizes[rank])))

        try:
            self._channel.run_on_all(prepare)
            wrong = self._exchange(parts, sends, mine, kept, wait)
            self._channel.run_on_all(lambda: self._keep(folder, parts, kept, wrong))
        except BaseException:
            for file in kept.values():
                file.step = None
            raise

    def _exchange(
        self,
        parts: _Parts,
        sends: Sequence[int],
        mine: Sequence[torch.Tensor],
        kept: Mapping[int, _Kept],
        wait: Callable[[float], None],
    ) -> list[int]:
        """Return the ranks whose part did not arrive as it was sent. Raises: RankLostError."""
        for rank, file in kept.items():
            file.digests = torch.empty(parts.digests_bytes(rank), dtype=torch.uint8, device="cpu")
        self._channel.begin_exchange(
            dict.fromkeys(sends, mine[0]) if sends else {},
            {rank: file.digests for rank, file in kept.items() if len(file.digests)},
        )()
        wrong = [rank for rank, file in kept.items() if not parts.are_digests(rank, file.digests)]
        arrived: dict[int, torch.Tensor] = {}
        for begin in range(0, max(parts.sizes, default=0), PIECE_BYTES):
            began, end = time.monotonic(), begin + PIECE_BYTES
            piece = mine[1][begin:end] if sends else torch.empty(0)
            places = {rank: file.data[begin:end] for rank, file in kept.items() if begin < len(file.data)}
            arrive = self._channel.begin_exchange(dict.fromkeys(sends, piece) if len(piece) else {}, places)
            # Of the round before, while this one is under way.
            wrong += _differing(begin - PIECE_BYTES, arrived, kept)
            arrive()
            arrived, last = places, begin
            wait(time.monotonic() - began)
        return wrong + (_differing(last, arrived, kept) if arrived else [])

    def _keep(self, folder: Path, parts: _Parts, kept: Mapping[int, _Kept], wrong: Sequence[int]) -> None:
        if wrong:
            raise CorruptError(f"the part of rank {wrong[0]} arrived with other bytes than it was sent with")
        for rank, file in kept.items():
            if parts.sizes[rank]:
                DISK.write_file(folder / blocks_name(rank), file.digests.numpy().tobytes())
                if self._durable:
                    DISK.sync_file(file.fd)
                DISK.link(file.path, folder / data_name(rank))

    def keep_only(self, step: int | None) -> None:
        """Give up what was received of other checkpoints than that of `step`: their folders are gone."""
        for file in self._files:
            if file.step != step:
                file.step = None

    def forget(self) -> None:
        """Let go of slots that were given up."""
        self._slots_mapped = {}

    def close(self) -> None:
        """Give up the memory. Its names are gone with the folder, or are part of a checkpoint."""
        for file in self._files:
            with contextlib.suppress(OSError):
                DISK.remove_file(file.path)
        self._files = []
        self._slots_mapped = {}

    def _own(self, path: Path, size_bytes: int) -> torch.Tensor:
        """Return the bytes of this rank's part. Slots come again, and what is mapped already need not be touched anew.
        Raises: OSError."""
        key = path.stat().st_ino, size_bytes
        if key not in self._slots_mapped:
            while len(self._slots_mapped) >= _MAPPED:
                self._slots_mapped.pop(next(iter(self._slots_mapped)))
            self._slots_mapped[key] = mapped(path, size_bytes)
        return self._slots_mapped[key]

    def _file_for(self, size_bytes: int, step: int) -> _Kept:
        """Return memory that has been used before, where there is some of that size. Raises: OSError."""
        file = next((each for each in self._files if each.step is None and len(each.data) == size_bytes), None)
        if file is None:
            for each in [each for each in self._files if each.step is None]:
                DISK.remove_file(each.path)
                self._files.remove(each)
            file = _Kept(self._slots, size_bytes)
            self._files.append(file)
        file.step = step
        return file


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


def _differing(begin: int, arrived: Mapping[int, torch.Tensor], kept: Mapping[int, _Kept]) -> list[int]:
    """Return the ranks of whose piece, which begins there, a block does not match its digest."""
    return [rank for rank, piece in arrived.items() if not _matches(begin, piece, view_of(kept[rank].digests))]


def _matches(begin: int, piece: torch.Tensor, digests: memoryview) -> bool:
    view, at = view_of(piece), begin // BLOCK_BYTES * DIGEST_BYTES
    return all(
        xxh3_128_digest(view[low : low + BLOCK_BYTES]) == digests[at + number * DIGEST_BYTES :][:DIGEST_BYTES]
        for number, low in enumerate(range(0, len(view), BLOCK_BYTES))
    )

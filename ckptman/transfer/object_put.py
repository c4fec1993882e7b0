"""Putting files into an object store: pieces of all of them over a few threads, digested on the way. Torch-free.

On S3 a large file is put in parts, several at a time, each tried again by itself. On other stores of fsspec it is put
from its first byte to its last, whole files at a time.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Mapping
from contextlib import suppress
from itertools import accumulate
from typing import Any

from ckptman.catalog.backends.object_source import THREADS
from ckptman.catalog.backends.object_store import ObjectBackend
from ckptman.catalog.backends.source import Original, Reading, of_source
from ckptman.errors import CkptmanError, NotFoundError
from ckptman.io.workers import STRIDE_BYTES, share_out, stride_of
from ckptman.transfer.copy_digest import OnTheWay
from ckptman.transfer.progress import Limit, Meter

PART_BYTES = 4 * STRIDE_BYTES
MOST_PARTS = 10_000
"""S3 takes no more for one object."""


def put_files(
    original: Original,
    place: ObjectBackend,
    sizes: Mapping[str, int],
    *,
    meter: Meter,
    limit: Limit | None = None,
    threads: int | None = None,
) -> None:
    """Put these files of a checkpoint below its name. What was begun of an object is given up where one fails.

    Raises: CorruptError (it is not what was saved), RootError.
    """
    block = original.facts.block_bytes
    part = stride_of(block, max(PART_BYTES, -(-max(sizes.values(), default=0) // (MOST_PARTS // 2))))
    if not hasattr(place.fs, "call_s3"):
        part = max(part, max(sizes.values(), default=0))
    in_order = sorted(sizes.items(), key=lambda each: -each[1])
    files = [_Upload(original, place, name, size, part, meter, limit) for name, size in in_order]
    starts = list(accumulate((each.parts for each in files), initial=0))
    meter.begin("copying", sum(sizes.values()), len(files))

    def put(number: int, scratch: memoryview) -> None:
        which = bisect_right(starts, number) - 1
        files[which].put(number - starts[which], scratch)

    try:
        share_out(starts[-1], put, threads=threads or THREADS, scratch_bytes=STRIDE_BYTES)
    finally:
        for each in files:
            each.give_up()


class _Upload:
    """One file on its way. Its object appears when its last part has come."""

    def __init__(
        self,
        original: Original,
        place: ObjectBackend,
        name: str,
        size: int,
        part: int,
        meter: Meter,
        limit: Limit | None,
    ) -> None:
        self.parts = max(1, -(-size // part))
        self._original, self._place, self._name, self._size, self._part = original, place, name, size, part
        self._meter, self._limit = meter, limit
        self._object = f"{original.facts.name}/{name}"
        self._passing = OnTheWay(original, name, size)
        self._lock = threading.Lock()
        self._left = self.parts
        self._reading: Reading | None = None
        self._upload = ""
        self._tags: dict[int, str] = {}
        self._seconds = 0.0

    def put(self, number: int, scratch: memoryview) -> None:
        """Put a part; after the last one, all of it."""
        self._begin()
        low = number * self._part
        size = min(self._part, self._size - low)
        if self.parts == 1:
            self._put_whole(size, scratch)
        else:
            data = self._read(low, size, scratch)
            begun = time.perf_counter()
            answer = self._ask("upload_part", PartNumber=number + 1, UploadId=self._upload, Body=data)
            self._tags[number + 1] = answer["ETag"]
            self._meter.moved(size, time.perf_counter() - begun)
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._end()

    def give_up(self) -> None:
        """Let go of what was begun and did not end."""
        if self._reading is not None:
            self._reading.close()
            self._reading = None
        if self._upload:
            with suppress(CkptmanError):
                self._ask("abort_multipart_upload", UploadId=self._upload)
            self._upload = ""

    def _begin(self) -> None:
        with self._lock:
            if self._reading is not None:
                return
            begun = time.perf_counter()
            with of_source(self._original.facts.where):
                self._passing.begin()
                if self.parts > 1:
                    self._upload = self._ask("create_multipart_upload")["UploadId"]
                self._reading = self._original.open(self._name)
            self._seconds += time.perf_counter() - begun

    def _end(self) -> None:
        begun = time.perf_counter()
        if self.parts > 1:
            self._passing.judge()  # before there is an object
            parts = [{"PartNumber": number, "ETag": tag} for number, tag in sorted(self._tags.items())]
            with suppress(NotFoundError):  # it was done, and the answer was lost: what is there is read back anyway
                self._ask("complete_multipart_upload", UploadId=self._upload, MultipartUpload={"Parts": parts})
            self._upload = ""
        self.give_up()
        self._meter.ended_file(self._seconds + time.perf_counter() - begun)

    def _read(self, low: int, size: int, scratch: memoryview) -> bytes:
        """A part, in pieces that fit the scratch and are whole blocks; checked."""
        assert self._reading is not None
        pieces, stride = [], stride_of(self._passing.block_bytes) if self._passing.works else STRIDE_BYTES
        begun = time.perf_counter()
        for at in range(low, low + size, stride):
            count = min(stride, low + size - at)
            if self._limit is not None:
                self._limit.take(count)
            with of_source(self._original.facts.where):
                data = self._reading.read(at, count, scratch)
            self._passing.check(at, data)
            pieces.append(bytes(data))
        self._meter.moved(0, time.perf_counter() - begun)
        return b"".join(pieces)

    def _put_whole(self, size: int, scratch: memoryview) -> None:
        if size <= PART_BYTES:
            data = self._read(0, size, scratch)
            self._passing.judge()
            begun = time.perf_counter()
            self._place.write(self._object, data)
            self._meter.moved(size, time.perf_counter() - begun)
        else:
            self._place.ask("written", lambda: self._stream(scratch), self._object)

    def _stream(self, scratch: memoryview) -> None:
        """Put all of it from front to back, on stores that know no parts of ours."""
        done = 0
        file: Any = self._place.fs.open(f"{self._place.prefix}/{self._object}", "wb", block_size=PART_BYTES)
        try:
            for low in range(0, self._size, PART_BYTES):
                data = self._read(low, min(PART_BYTES, self._size - low), scratch)
                begun = time.perf_counter()
                file.write(data)
                self._meter.moved(len(data), time.perf_counter() - begun)
                done += len(data)
            self._passing.judge()
        except BaseException:
            # To close it would make an object of what there is.
            with suppress(Exception):
                file.discard()
            self._meter.moved(-done, 0.0)
            raise
        file.close()

    def _ask(self, method: str, **arguments: Any) -> Any:
        bucket, key, _ = self._place.fs.split_path(f"{self._place.prefix}/{self._object}")
        call = self._place.fs.call_s3
        return self._place.ask("written", lambda: call(method, Bucket=bucket, Key=key, **arguments), self._object)

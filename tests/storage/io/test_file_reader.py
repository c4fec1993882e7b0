"""One file that several threads read: what it opens, what it gives at the end of the file, and past the page cache."""

import errno
import os
import random
from contextlib import closing

import pytest

from benchmarks.engine.cache import resident_share
from ckptman.errors import CorruptError
from ckptman.storage.io import file_reader
from ckptman.storage.io.durable_files import DISK
from ckptman.storage.io.file_reader import DIRECT_BYTES, FileReader, after, drop_from_cache, read_to_cache
from ckptman.storage.io.threads import ALIGN_BYTES, STRIDE_BYTES, aligned_memory

DATA = random.Random(1).randbytes(2 * DIRECT_BYTES + 777)


@pytest.fixture
def path(tmp_path):
    (tmp_path / "x").write_bytes(DATA)
    return tmp_path / "x"


@pytest.fixture
def reader(path):
    with closing(FileReader(path)) as made:
        yield made


def test_segments_are_filled_one_after_the_other_up_to_the_end_of_the_file(reader):
    places = [bytearray(3), bytearray(5), bytearray(4096)]
    assert reader.read([memoryview(place) for place in places], 7) == 3 + 5 + 4096
    assert b"".join(places) == DATA[7 : 7 + 3 + 5 + 4096]
    last = bytearray(100)
    assert reader.read([memoryview(last)], len(DATA) - 10) == 10
    assert last[:10] == DATA[-10:]
    assert reader.read([memoryview(last)], len(DATA) + 5) == 0


def test_it_is_opened_when_it_is_wanted_and_again_after_it_was_closed(path, reader):
    assert reader.open() == reader.open()
    assert reader.found.st_size == len(DATA)
    reader.close()
    reader.close()
    path.write_bytes(DATA[:-1])
    reader.read([memoryview(bytearray(1))], 0)
    assert reader.found.st_size == len(DATA) - 1


def test_what_is_not_a_file_is_refused_and_a_link_is_followed_on_demand(path):
    link = path.with_name("link")
    link.symlink_to(path)
    with pytest.raises(CorruptError, match="not a regular file"):
        FileReader(link).open()
    with closing(FileReader(link, follow=True)) as followed:
        assert os.fstat(followed.open()).st_size == len(DATA)
    with pytest.raises(CorruptError, match="not a regular file"):
        FileReader(path.parent).open()


@pytest.mark.parametrize("offset", [0, 5, ALIGN_BYTES, len(DATA) - 100])
def test_past_the_page_cache_the_same_bytes_come_or_none(reader, offset):
    scratch = aligned_memory(2 * DIRECT_BYTES)
    size = min(DIRECT_BYTES, len(DATA) - offset)
    inside = offset % ALIGN_BYTES
    count = reader.read_direct(offset, size, scratch)
    assert count in (0, size)
    assert scratch[inside : inside + count] == DATA[offset : offset + count]


def test_another_file_that_took_the_name_is_not_read_in_its_place(path, reader):
    scratch = aligned_memory(2 * DIRECT_BYTES)
    reader.open()
    path.with_name("y").write_bytes(bytes(len(DATA)))
    path.with_name("y").replace(path)
    assert reader.read_direct(0, DIRECT_BYTES, scratch) == 0
    place = bytearray(10)
    reader.read([memoryview(place)], 0)
    assert place == DATA[:10]


def test_where_the_page_cache_cannot_be_asked_nobody_knows(reader, monkeypatch):
    assert reader.is_cold(0, DIRECT_BYTES - 1) is None, "too little to be read past it"

    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "no such flag")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refuse)
        assert reader.is_cached(0) is None
    assert reader.is_cold(0, DIRECT_BYTES) is None


def test_a_python_that_cannot_ask_the_page_cache_reads_all_the_same(path, monkeypatch):
    """One that was built for an older libc."""
    monkeypatch.delattr(os, "RWF_NOWAIT")
    place = bytearray(len(DATA))
    with closing(FileReader(path)) as reader:
        assert reader.is_cached(0) is None
        assert reader.is_cold(0, 2 * DIRECT_BYTES) is None
        assert reader.read([memoryview(place)], 0) == len(DATA)
    assert bytes(place) == DATA


def test_what_is_left_of_segments():
    segments = [memoryview(b"abc"), memoryview(b"defg")]
    assert [bytes(each) for each in after(segments, 4)] == [b"efg"]
    assert after(segments, 7) == []


@pytest.mark.parametrize("kernel", ["this", "before 5.14"])
def test_a_file_is_read_to_the_page_cache_until_it_is_enough(tmp_path, kernel, monkeypatch):
    if kernel != "this":
        monkeypatch.setattr(file_reader, "_POPULATE_READ", 999)
    part, whole = tmp_path / "part", tmp_path / "whole"
    for path in (part, whole):
        DISK.write_file(path, bytes(16 * STRIDE_BYTES - 777))
        drop_from_cache(path)
    if resident_share(part) or resident_share(whole):
        pytest.skip("pages of files cannot be given up here")
    go_on = iter([True, True, False])
    read_to_cache(part, lambda: next(go_on))
    assert 1 / 16 < resident_share(part) < 0.9
    read_to_cache(whole, lambda: True)
    assert resident_share(whole) > 0.9


def test_no_link_is_read_to_the_page_cache(path, tmp_path):
    (tmp_path / "link").symlink_to(path)
    for call in (lambda: read_to_cache(tmp_path / "link", lambda: True), lambda: drop_from_cache(tmp_path / "link")):
        with pytest.raises(CorruptError):
            call()

"""Reading ranges of files: what is read is what was written, or it is refused."""

import errno
import fcntl
import itertools
import os
import random
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptman.errors import CorruptError
from ckptman.storage.io import checked_reader as ranges
from ckptman.storage.io import threads as parallel
from ckptman.storage.io.checked_reader import Wanted, read_wanted
from ckptman.storage.io.checksums import Digests
from ckptman.storage.io.threads import ALIGN_BYTES
from tests.faults.regions import flip
from tests.helpers.files import BLOCK, KIB, MIB, digests_of, into, random_bytes, tells_what_is_cached


def evict(path):
    """Have a file out of the page cache, where the file system has anything below it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


SIZE, BLOCKS = 300_001, [512, 4096, 96 * KIB, 100_000, 1 << 20, 1 << 30]
PIECES = st.lists(
    st.tuples(
        st.integers(0, 1),  # the file
        st.integers(0, SIZE),
        st.one_of(st.integers(0, 300), st.integers(0, 150_000), st.just(SIZE)),
        st.sampled_from(["into", "deliver", "whole", "whole into"]),
    ),
    max_size=24,
)


@pytest.fixture(scope="module")
def two_files(tmp_path_factory):
    made = tmp_path_factory.mktemp("two")
    for number in range(2):
        (made / f"{number}").write_bytes(random_bytes(SIZE, seed=number))
    digests = {block: {f"{n}": digests_of(made / f"{n}", block) for n in range(2)} for block in BLOCKS}
    return made, [(made / f"{number}").read_bytes() for number in range(2)], {None: None, **digests}


@settings(max_examples=60)
@given(
    PIECES,
    st.sampled_from([None, *BLOCKS]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0, 1, 5000]),
    st.sampled_from([4096, 65536, 1 << 22]),
    st.sampled_from(["warm", "cold", "from place to place"]),
)
def test_every_range_gets_its_bytes(two_files, pieces, block, threads, gap, stride, cache):
    folder, data, digests = two_files
    expected, calls, wanted, covered = [], [], [], np.zeros((2, SIZE), bool)
    for file, offset, size, how in pieces:
        size = min(size, SIZE - offset)
        place, count = bytearray(size), []
        expected.append((place, data[file][offset : offset + size]))
        covered[file, offset : offset + size] = True
        if "into" in how:
            wanted.append(Wanted(f"{file}", offset, size, into=memoryview(place), whole="whole" in how))
            continue
        calls.append((how, size, count))

        def deliver(piece, at, place=place, count=count):
            place[at : at + len(piece)] = piece
            count.append(len(piece))

        wanted.append(Wanted(f"{file}", offset, size, deliver=deliver, whole="whole" in how))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "STRIDE_BYTES", stride)
        patch.setattr(ranges, "DIRECT_BYTES", 1)
        patch.setattr(ranges, "GAP_BYTES", gap)
        for number in range(2) if cache != "warm" else []:
            evict(folder / f"{number}")
        if cache == "from place to place":
            (folder / "0").read_bytes()
        read_bytes = read_wanted(folder, wanted, digests[block], threads=threads)
    assert all(place == right for place, right in expected)
    for how, size, count in calls:
        assert sum(count) == size
        assert how != "whole" or len(count) == (size > 0)
    if gap == 0 and all("whole" not in how for *_, how in pieces):
        blocks = np.logical_or.reduceat(covered, np.arange(0, SIZE, block or 1), axis=1).sum()
        assert read_bytes <= blocks * (block or 1), "each block once"


def test_only_what_is_wanted_is_read(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(random_bytes(4 * MIB))
    digests = {"x": digests_of(tmp_path / "x")}
    wanted = [into("x", at + 100, 10) for at in range(0, 4 * MIB, MIB)]
    assert read_wanted(tmp_path, wanted, digests) == 4 * BLOCK
    assert read_wanted(tmp_path, wanted, None) == 40
    near = [into("x", at, 10) for at in range(0, 8 * KIB, KIB)]
    assert read_wanted(tmp_path, near, None) == 7 * KIB + 10
    monkeypatch.setattr(ranges, "GAP_BYTES", 0)
    assert read_wanted(tmp_path, near, None) == 80


def test_many_small_ranges_and_large_whole_ones(tmp_path):
    data = random_bytes(32 * MIB)
    (tmp_path / "x").write_bytes(data)
    digests = {"x": digests_of(tmp_path / "x")}
    places = [bytearray(9000) for _ in range(3000)]  # more than one call can scatter
    wanted = [into("x", number * 10_000, 9000, place=place) for number, place in enumerate(places)]
    got = {}
    wholes = [77, 7 * MIB + 5, 15 * MIB + 1, 23 * MIB + 9]

    def keep(start):
        return lambda piece, _: got.update({start: bytes(piece)})

    wanted += [Wanted("x", at, 8 * MIB, deliver=keep(at), whole=True) for at in wholes]
    for each, most in ((digests, 33 * MIB), (None, 48 * MIB)):
        got.clear()
        assert read_wanted(tmp_path, wanted, each, threads=2) < most
        assert all(place == data[n * 10_000 : n * 10_000 + 9000] for n, place in enumerate(places))
        assert all(got[at] == data[at : at + 8 * MIB] for at in wholes)


def test_nothing_wanted_is_fine(tmp_path):
    assert read_wanted(tmp_path, [], None) == 0
    assert read_wanted(tmp_path, [into("gone", 7, 0)], None) == 0


@pytest.mark.parametrize(
    "wanted",
    [
        Wanted("x", -1, 8, into=memoryview(bytearray(8))),
        Wanted("x", 0, 9, into=memoryview(bytearray(8))),
        Wanted("x", 0, 8),
        Wanted("x", 0, 8, into=memoryview(bytearray(8)), deliver=lambda *_: None),
        Wanted("x", 0, ranges.WHOLE_BYTES + 1, deliver=lambda *_: None, whole=True),
    ],
)
def test_ranges_that_are_none_are_refused(tmp_path, wanted):
    with pytest.raises(ValueError, match="x"):
        read_wanted(tmp_path, [wanted], None)


REMEDY = "restore an older checkpoint"


@pytest.mark.parametrize("threads", [1, 4])
def test_a_flipped_byte_is_found_exactly_when_its_block_is_read(folder, threads):
    data, path = bytearray(random_bytes(5 * MIB + 77)), folder / "x"
    path.write_bytes(data)
    digests = {"x": digests_of(path)}
    for flipped in (0, BLOCK - 1, BLOCK, 33 * BLOCK + 5, len(data) - 1):
        bad = flipped // BLOCK
        low, high = bad * BLOCK, min((bad + 1) * BLOCK, len(data))
        flip(path, flipped, 0)
        for wanted in (into("x", 0, len(data), "all"), into("x", low, 1, "layers.0.weight")):
            with pytest.raises(CorruptError) as caught:
                read_wanted(folder, [wanted], digests, threads=threads)
            parts = (str(path), f"block {bad} ", f"bytes {low} to {high}", "verify", wanted.label, REMEDY)
            assert all(part in str(caught.value) for part in parts)
        around = [into("x", 0, low), into("x", high, len(data) - high)]
        assert read_wanted(folder, around, digests, threads=threads) == len(data) - (high - low)
        assert read_wanted(folder, [into("x", 0, len(data))], None) == len(data)
        flip(path, flipped, 0)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_flipped_byte_is_found_wherever_large_blocks_and_tensors_begin_and_end(tmp_path, threads):
    seed = random.randrange(10**6)
    draw, size, path = random.Random(seed), 23 * MIB + 4096, tmp_path / "x"
    data = random_bytes(size)
    path.write_bytes(data)
    digests = {"x": digests_of(path)}
    edges = [0, 40, 3 * MIB, 3 * MIB + 500, 4 * MIB, 9 * MIB + 7, 16 * MIB, 16 * MIB + BLOCK, size]
    places = [bytearray(end - begin) for begin, end in itertools.pairwise(edges)]
    wanted = [into("x", begin, len(each), place=each) for begin, each in zip(edges, places)]
    assert read_wanted(tmp_path, wanted, digests, threads=threads) == size
    assert b"".join(places) == data
    for flipped in (0, 4 * MIB - 1, 4 * MIB, size - 1, *(draw.randrange(size) for _ in range(6))):
        flip(path, flipped, 0)
        with pytest.raises(CorruptError, match=f"in block {flipped // BLOCK} "):
            read_wanted(tmp_path, wanted, digests, threads=threads)
        flip(path, flipped, 0)
    assert read_wanted(tmp_path, wanted, digests, threads=threads) == size, f"seed {seed}"


def test_a_large_block_is_two_calls_of_the_interpreter(tmp_path):
    """Each waits its turn for it. Counted from two sizes, so that what a load takes once is left out."""
    sizes = 24 * MIB, 120 * MIB
    for size in sizes:
        (tmp_path / f"{size}").write_bytes(bytes(size))
        (tmp_path / f"{size}").read_bytes()
    if not tells_what_is_cached(tmp_path):
        pytest.skip("this file system does not tell what is in the page cache")

    def calls(size):
        digests, wanted, count = {f"{size}": digests_of(tmp_path / f"{size}")}, [into(f"{size}", 0, size)], 0

        def note(frame, event, argument):
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            read_wanted(tmp_path, wanted, digests, threads=1)
        finally:
            sys.setprofile(None)
        return count

    first, second = map(calls, sizes)
    assert (second - first) * 1024 * MIB / (sizes[1] - sizes[0]) < 2000


def test_only_the_tensors_of_the_bad_block_are_named(tmp_path):
    (tmp_path / "x").write_bytes(bytes(BLOCK * 2))
    digests = {"x": Digests(BLOCK, digests_of(tmp_path / "x").blocks[:16] + bytes(16), 2 * BLOCK)}
    seen = []
    wanted = [into("x", number * KIB, KIB, f"t{number}") for number in range(2 * BLOCK // KIB)]
    wanted.append(Wanted("x", BLOCK, 4, deliver=lambda *_: seen.append(1)))
    with pytest.raises(CorruptError, match=r"of t128, t129, t130 and 125 more"):
        read_wanted(tmp_path, wanted, digests)
    assert not seen


@pytest.mark.parametrize("threads", [1, 4])
def test_files_that_are_shrunk_grown_or_no_files(tmp_path, threads):
    size, path = MIB, tmp_path / "x"
    path.write_bytes(random_bytes(size))
    digests = {"x": digests_of(path)}

    def fails(match, *ways):
        for each in ways:
            with pytest.raises(CorruptError, match=match) as caught:
                read_wanted(tmp_path, [into("x", 0, size, "weight")], each, threads=threads)
            assert all(text in str(caught.value) for text in (str(path), "weight", REMEDY))

    for found in (size - 1, 0, size + 1):
        os.truncate(path, found)
        fails(f"has {found} bytes instead of {size}", digests)
        if found < size:
            fails(f"has only {found} bytes", None)
    path.unlink()
    fails("is missing", digests, None)
    path.mkdir()
    fails("is not a regular file", digests)
    path.rmdir()
    os.mkfifo(path)
    fails("is not a regular file", digests, None)


def test_digests_that_do_not_fit_are_refused(tmp_path):
    (tmp_path / "x").write_bytes(bytes(BLOCK))
    good = digests_of(tmp_path / "x")
    wanted = [into("x", 0, 10, "weight")]
    with pytest.raises(CorruptError, match="no digests"):
        read_wanted(tmp_path, wanted, {})
    with pytest.raises(CorruptError, match="does not match its digests"):
        read_wanted(tmp_path, wanted, {"x": Digests(BLOCK, good.blocks[:15], BLOCK)})
    with pytest.raises(CorruptError, match="is to give"):
        read_wanted(tmp_path, [into("x", BLOCK, 1)], {"x": good})


def test_a_file_shrunk_while_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_bytes(random_bytes(2 * MIB))
    digests, real = {"x": digests_of(path)}, os.preadv

    def shrink(fd, buffers, offset, flags=0):
        os.truncate(path, MIB + 3)
        return real(fd, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", shrink)
    with pytest.raises(CorruptError, match=rf"has only {MIB + 3} bytes and ends before block 8 .* does"):
        read_wanted(tmp_path, [into("x", 0, 2 * MIB)], digests, threads=1)


def test_short_reads_are_completed(tmp_path, monkeypatch):
    data, real = random_bytes(3 * MIB + 1), os.preadv
    (tmp_path / "x").write_bytes(data)
    rng = random.Random(3)

    def less(fd, buffers, offset, flags=0):
        if flags and rng.random() < 0.3:
            raise BlockingIOError(errno.EAGAIN, "not in memory")
        if flags and rng.random() < 0.3:
            raise OSError(errno.EOPNOTSUPP, "no such flag")
        return real(fd, [buffers[0][: rng.randint(1, len(buffers[0]))]], offset)

    monkeypatch.setattr(os, "preadv", less)
    for digests in ({"x": digests_of(tmp_path / "x")}, None):
        places = [bytearray(100_000) for _ in range(30)]
        wanted = [into("x", number * 101_000, 100_000, place=place) for number, place in enumerate(places)]
        read_wanted(tmp_path, wanted, digests, threads=2)
        assert all(place == data[n * 101_000 : n * 101_000 + 100_000] for n, place in enumerate(places))


def as_ever(real):
    return real


def refused(real):
    def call(fd, *rest):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, *rest)

    return call


def cut_short(real):
    def call(fd, buffers, offset, flags=0):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            buffers = [buffers[0][: len(buffers[0]) // 2 // ALIGN_BYTES * ALIGN_BYTES]]
        return real(fd, buffers, offset, flags)

    return call


@pytest.mark.parametrize("how", [as_ever, refused, cut_short])
@pytest.mark.parametrize("checked", [True, False])
def test_what_is_not_in_the_page_cache_is_read_past_it(tmp_path, monkeypatch, checked, how):
    size = 9 * MIB + 777
    data, path = random_bytes(size), tmp_path / "x"
    path.write_bytes(data)
    digests = {"x": digests_of(path)} if checked else None
    wanted = [into("x", 1000, 5 * MIB), into("x", 6 * MIB + 1, 3 * MIB + 776)]
    flags, real = [], os.open

    def record(path, flag, *rest):
        flags.append(flag)
        return real(path, flag, *rest)

    monkeypatch.setattr(os, "open", record)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    read_wanted(tmp_path, wanted, digests)
    assert len(flags) == 1, "it is in the page cache"
    monkeypatch.setattr(os, "preadv", how(os.preadv))
    for _ in range(5):  # to ask whether a page is there has the kernel fetch it, which may be faster than the answer
        evict(path)
        for each in wanted:
            assert each.into is not None
            each.into[:] = bytes(len(each.into))
        read_wanted(tmp_path, wanted, digests)
        if any(flag & os.O_DIRECT for flag in flags):
            break
    # Where nobody can tell what is in the page cache, all is read through it.
    assert any(flag & os.O_DIRECT for flag in flags) == tells_what_is_cached(tmp_path)
    for each in wanted:
        assert each.into == data[each.offset : each.offset + each.bytes]


@pytest.mark.parametrize("place", [0, 3 * MIB + 5, 8 * MIB])
def test_a_flipped_byte_is_found_in_what_is_read_past_the_cache(tmp_path, place):
    data, path = bytearray(random_bytes(8 * MIB + 1)), tmp_path / "x"
    path.write_bytes(data)
    digests = {"x": digests_of(path)}
    data[place] ^= 4
    path.write_bytes(data)
    evict(path)
    delivered = []
    wanted = [
        Wanted("x", at, MIB, deliver=lambda piece, _, at=at: delivered.append((at, len(piece))), whole=True)
        for at in range(0, 8 * MIB, MIB)
    ]
    with pytest.raises(CorruptError, match=rf"does not match its digests in block {place // BLOCK} "):
        read_wanted(tmp_path, [*wanted, into("x", 8 * MIB, 1)], digests, threads=1)
    assert all(not at <= place < at + MIB for at, _ in delivered)


@pytest.mark.parametrize("threads", [1, 4])
def test_an_error_of_the_disk_is_told_as_damage(tmp_path, threads, monkeypatch):
    (tmp_path / "x").write_bytes(bytes(16 * MIB))
    digests, reads = {"x": digests_of(tmp_path / "x")}, []

    def fail(fd, buffers, offset, flags=0):
        reads.append(offset)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CorruptError, match=r"cannot be read in block \d+ .*Input/output error.*of weight") as caught:
        read_wanted(tmp_path, [into("x", 0, 16 * MIB, "weight")], digests, threads=threads)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EIO
    assert len(reads) <= 4 * threads


@pytest.mark.parametrize("threads", [1, 4])
def test_an_error_of_a_receiver_is_raised_as_it_is(tmp_path, threads):
    (tmp_path / "x").write_bytes(bytes(32 * MIB))
    calls = []

    def deliver(piece, at):
        calls.append(at)
        raise LookupError("no room")

    with pytest.raises(LookupError, match="no room"):
        read_wanted(tmp_path, [Wanted("x", 0, 32 * MIB, deliver=deliver)], None, threads=threads)
    assert len(calls) <= 2 * threads


@pytest.mark.parametrize(("cores", "expected"), [(1, 2), (3, 3), (64, 6)])
def test_no_more_threads_than_cores_read_what_is_in_the_page_cache(cores, expected, tmp_path, monkeypatch):
    used = []

    def relay(*arguments, first_threads, then_threads, **options):
        assert not then_threads
        used.append(first_threads)
        parallel.relay(*arguments, first_threads=first_threads, then_threads=0, **options)

    monkeypatch.setattr(ranges, "cores", lambda: cores)
    monkeypatch.setattr(ranges, "relay", relay)
    data = bytearray(4 * MIB)
    (tmp_path / "x").write_bytes(random_bytes(4 * MIB))
    wanted = [Wanted("x", 0, 4 * MIB, into=memoryview(data))]
    read_wanted(tmp_path, wanted, None, threads=6)
    # It may come from the other end of a network, or only begin there: then a disk is waited for.
    for is_cold in (lambda *_: None, lambda _, each, position: position >= MIB):
        monkeypatch.setattr(ranges._File, "is_cold_at", is_cold)
        read_wanted(tmp_path, wanted, None, threads=6)
    assert used == [expected if tells_what_is_cached(tmp_path) else 6, 6, 6]
    assert data == (tmp_path / "x").read_bytes()


@pytest.mark.parametrize("threads", [1, 4, 16, 300])
def test_scratch_does_not_grow_with_the_threads(tmp_path, monkeypatch, threads):
    size = 40 * MIB
    (tmp_path / "x").write_bytes(random_bytes(size))
    digests, place = {"x": digests_of(tmp_path / "x")}, bytearray(size)
    asked = []

    def noted(count, first, then, **options):
        asked.append((options["first_threads"] + options["then_threads"]) * options["scratch_bytes"])
        parallel.relay(count, first, then, **options)

    monkeypatch.setattr(ranges, "relay", noted)
    for cold in (True, False, None):
        monkeypatch.setattr(ranges, "_begins_cold", lambda _, cold=cold: cold)
        place[:] = bytes(size)
        read_wanted(tmp_path, [into("x", 0, size, place=place)], digests, threads=threads)
        assert place == (tmp_path / "x").read_bytes()
    assert max(asked) <= 256 * MIB


@pytest.mark.parametrize("block", [96 * KIB, 100_000, BLOCK, 3 * MIB, 8 * MIB, 1 << 30])
@pytest.mark.parametrize("cold", [True, False, None])
def test_small_ranges_far_inside_a_file_whatever_its_blocks_are(tmp_path, monkeypatch, block, cold):
    data = random_bytes(21 * MIB)
    (tmp_path / "x").write_bytes(data)
    digests = {"x": digests_of(tmp_path / "x", block)}
    monkeypatch.setattr(ranges, "_begins_cold", lambda _: cold)
    edges = [(4 * MIB - 10 * KIB, 100_000), (5 * MIB, 1000), (9 * MIB, 9 * MIB), (20 * MIB + 7, 1)]
    places = [bytearray(size) for _, size in edges]
    read_wanted(tmp_path, [into("x", *edge, place=place) for edge, place in zip(edges, places)], digests, threads=4)
    assert places == [data[low : low + size] for low, size in edges]


@pytest.mark.parametrize("offset", [0, 64 * KIB, 3 * MIB + 900 * KIB, 4 * MIB - 4096])
def test_what_is_in_the_page_cache_is_told_wherever_it_begins(tmp_path, offset):
    (tmp_path / "x").write_bytes(bytes(12 * MIB))
    if not tells_what_is_cached(tmp_path):
        pytest.skip("this file system does not tell what is in the page cache")
    (tmp_path / "x").read_bytes()
    file = ranges._File(tmp_path / "x", digests_of(tmp_path / "x"))
    assert ranges._begins_cold({file: [into("x", offset, 4 * MIB)]}) is False
    file.reader.close()

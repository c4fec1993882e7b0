"""What people write in options: sizes, durations, rates, counts, and rules to keep."""

import pytest

from ckptman.cli.options import parse_count, parse_keep_best, parse_numbers, parse_rate, parse_seconds, parse_size
from ckptman.errors import ConfigError
from ckptman.policies.retention_plan import KeepBest

SIZES = {
    "70GB": 70 * 10**9,
    "70 gb": 70 * 10**9,
    "1.5TiB": 3 * 2**39,
    "256MiB": 2**28,
    "256M": 2**28,
    "4096": 4096,
    "4096B": 4096,
    "1kB": 1000,
    "0.5KiB": 512,
    "1PB": 10**15,
}


@pytest.mark.parametrize(("written", "size"), SIZES.items())
def test_sizes(written, size):
    assert parse_size("--size", written) == size


NO_SIZES = ["", " ", "0", "0.0GB", "-1", "-70GB", "GB", "1e9", "nan", "inf", "70XB", "1,5GB", "7 0GB", "9" * 30, "0.1B"]


@pytest.mark.parametrize("written", NO_SIZES)
def test_no_sizes(written):
    with pytest.raises(ConfigError, match="--size"):
        parse_size("--size", written)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("90", 90), ("90s", 90), ("1.5h", 5400), ("1h30min", 5400), ("1h 30m", 5400), ("4d", 345_600), ("2e3", 2000)],
)
def test_times(written, seconds):
    assert parse_seconds("--x", written) == seconds


@pytest.mark.parametrize(
    "written", ["", " ", "h", "0", "0s", "-1s", "1x", "1h30", "nan", "inf", "1e400", "1,5h", "１h"]
)
def test_what_is_no_time(written):
    with pytest.raises(ConfigError, match="--x: a time above 0"):
        parse_seconds("--x", written)


def test_rates():
    assert parse_rate("--limit", "2GB/s") == parse_rate("--limit", "2GB") == 2e9
    assert parse_rate("--limit", "5GB/s") == 5e9
    assert parse_rate("--limit", "1.5 TB/s") == 1.5e12
    assert parse_rate("--limit", "800MiB/s") == 800 * 2**20
    for written in ("5", "5/s", "-1GB/s", "1e9B/s", "GB/s", "0GB/s", "5GB/h", "inf"):
        with pytest.raises(ConfigError, match="such as 5GB/s"):
            parse_rate("--limit", written)


def test_counts():
    assert [parse_count("--x", each) for each in ("9e9", "7B", "350M", "1.5t", "8192", "64k")] == [
        *(9_000_000_000, 7_000_000_000, 350_000_000, 1_500_000_000_000, 8192, 64_000)
    ]


def test_numbers():
    assert parse_numbers("--x", "1, 2,4,2", "numbers", "1,2", most=4) == [1, 2, 4, 2]
    for written in ("", "1,", "1,two", "-1", "5", "1.5"):
        with pytest.raises(ConfigError, match="--x: numbers with commas between them, such as 1,2, not"):
            parse_numbers("--x", written, "numbers", "1,2", most=4)


@pytest.mark.parametrize(
    ("written", "rule"),
    [
        ("loss", KeepBest("loss")),
        ("loss:3", KeepBest("loss", 3)),
        ("loss:3:min", KeepBest("loss", 3)),
        ("accuracy:max", KeepBest("accuracy", 1, "max")),
        ("eval:loss", KeepBest("eval:loss")),
        ("eval:loss:2:max", KeepBest("eval:loss", 2, "max")),
        ("max", KeepBest("max")),
    ],
)
def test_keep_best_as_it_is_written(written, rule):
    assert parse_keep_best(written) == rule

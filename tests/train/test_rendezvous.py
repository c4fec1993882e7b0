"""What goes wrong when ranks meet is named, with a remedy, on every rank that can be told. Ranks are threads here."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptman.errors import CkptmanError, ConfigError, RankLostError
from ckptman.train.launch import Launch
from ckptman.train.rendezvous import meet


@pytest.fixture
def environ():
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def rank(number, world_size):
    return Launch(number, world_size, number, world_size, alone=False)


def come(launches, environ, seconds):
    """What each of these ranks gets: an error, or None where all met. Nobody leaves before all have what they get."""

    def one(launch):
        try:
            return meet(launch, environ, seconds), None
        except CkptmanError as error:
            return None, error

    with ThreadPoolExecutor(len(launches)) as pool:
        results = list(pool.map(one, launches))
    return [error for _, error in results]


def test_all_come(environ):
    assert come([rank(number, 4) for number in range(4)], environ, 60) == [None] * 4


@pytest.mark.parametrize(
    ("ranks", "seconds", "kind", "told"),
    [
        ([(0, 4), (2, 4)], 2, RankLostError, "2 of 4 ranks came within 2 s, on {host}; missing: 1, 3."),
        ([(1, 2)], 2, RankLostError, "rank 1 on {host} reached nobody at 127.0.0.1:{port}"),
        ([(0, 2), (1, 3)], 60, ConfigError, "the ranks see different worlds: rank "),
        ([(0, 3), (1, 3), (1, 3)], 60, ConfigError, "two processes are rank 1"),
    ],
)
def test_all_that_come_are_told_who_is_missing_or_too_many(environ, ranks, seconds, kind, told):
    for error in come([rank(*each) for each in ranks], environ, seconds):
        assert isinstance(error, kind)
        assert told.format(host=socket.gethostname(), port=environ["MASTER_PORT"]) in str(error)


def test_a_port_in_use(environ):
    with socket.socket(socket.AF_INET6) as taken:
        taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        taken.bind(("::", int(environ["MASTER_PORT"])))
        taken.listen()
        (error,) = come([rank(0, 2)], environ, 5)
    assert isinstance(error, ConfigError)
    assert f"MASTER_PORT {environ['MASTER_PORT']} is in use on " in str(error)


@pytest.mark.parametrize("port", ["", "http", "70000", "0", "-1"])
def test_what_is_no_port(port):
    with pytest.raises(ConfigError, match="MASTER_PORT is"):
        meet(rank(0, 2), {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}, 5)

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


@pytest.mark.slow
def test_a_rank_that_is_missing_is_named_on_all_others(environ):
    errors = come([rank(0, 4), rank(2, 4)], environ, 2)
    for error in errors:
        assert isinstance(error, RankLostError)
        assert f"2 of 4 ranks came within 2 s, on {socket.gethostname()}; missing: 1, 3." in str(error)


def test_ranks_that_see_different_worlds(environ):
    errors = come([rank(0, 2), rank(1, 3)], environ, 60)
    for error in errors:
        assert isinstance(error, ConfigError)
        assert "the ranks see different worlds: rank " in str(error)
        assert "one srun" in str(error)


def test_two_processes_with_one_rank(environ):
    errors = come([rank(0, 3), rank(1, 3), rank(1, 3)], environ, 60)
    for error in errors:
        assert isinstance(error, ConfigError)
        assert "two processes are rank 1" in str(error)


def test_a_port_in_use(environ):
    with socket.socket(socket.AF_INET6) as taken:
        taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        taken.bind(("::", int(environ["MASTER_PORT"])))
        taken.listen()
        (error,) = come([rank(0, 2)], environ, 5)
    assert isinstance(error, ConfigError)
    assert f"MASTER_PORT {environ['MASTER_PORT']} is in use on " in str(error)


@pytest.mark.slow
def test_nobody_is_there(environ):
    (error,) = come([rank(1, 2)], environ, 2)
    assert isinstance(error, RankLostError)
    assert f"rank 1 on {socket.gethostname()} reached nobody at 127.0.0.1:{environ['MASTER_PORT']}" in str(error)


@pytest.mark.parametrize("port", ["", "http", "70000", "0", "-1"])
def test_what_is_no_port(port):
    with pytest.raises(ConfigError, match="MASTER_PORT is"):
        meet(rank(0, 2), {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}, 5)

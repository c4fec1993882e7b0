"""Everybody at one root at once: nothing that is to be kept is lost, and nothing vanishes under who reads it."""

import random

import pytest

from tests.helpers.torture import torture

SHORT_SECONDS = 60.0
LONG_SECONDS = 1200.0


def check(folder, seconds):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    found = torture(folder, seconds, seed)
    print(dict(found))
    # That little would prove nothing.
    assert found["commits"] > 50
    assert found["deleted"] > 20
    assert found["restores"] > 20
    assert found["reads with a lease"] > 20
    assert found["copies"] > 5
    assert found["pins"] > 5
    assert found["kills"] > 5


@pytest.mark.slow
def test_everybody_at_once(tmp_path):
    check(tmp_path, SHORT_SECONDS)


@pytest.mark.campaign
@pytest.mark.timeout(LONG_SECONDS + 600)
def test_everybody_at_once_for_twenty_minutes(tmp_path):
    check(tmp_path, LONG_SECONDS)

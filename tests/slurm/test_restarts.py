"""Restarts inside the allocation: the bundled loop under the torchrun template, on a real Slurm, 2 nodes x 2 ranks."""

import signal

import pytest

from tests.helpers.forkserver import worker_of
from tests.slurm.bundled import INTERVAL, check, trains
from tests.slurm.torchrun_chain import begin, node_of, programs, ranks, starts

__all__ = ["programs"]

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("programs")]


@pytest.mark.parametrize(
    ("number", "settings"),
    [
        pytest.param(signal.SIGKILL, {}, id="killed"),
        pytest.param(signal.SIGSTOP, {"run__watchdog_seconds": 5.0}, id="hung", marks=pytest.mark.campaign),
    ],
)
def test_ranks_are_restarted_within_the_job(lab, tokens, whole, tmp_path, number, settings):
    scene = begin(lab, tmp_path, tokens, "restarts=2", **settings)
    job = trains(scene, tmp_path, 1)
    worker_of(ranks(job)[3]).send_signal(number)
    scene.finishes(200)
    assert len(scene.chain.attempts()) == 1, scene.log()
    assert starts(tmp_path) == [job, job]
    check(tmp_path, whole, allowed=INTERVAL)


def test_a_planned_stop_is_no_crash(lab, tokens, whole, tmp_path):
    scene = begin(lab, tmp_path, tokens, "restarts=2")
    job = trains(scene, tmp_path, 1)
    ranks(job)[3].send_signal(signal.SIGUSR1)  # nobody else is told, and torchrun least of all
    scene.finishes(150)
    assert [end.ending for end in scene.chain.ends().values()] == ["stopped", "finished"], scene.log()
    assert scene.chain.ends()[1].returncode == 75
    assert len(starts(tmp_path)) == 2
    check(tmp_path, whole, allowed=0)


def test_a_spare_node_replaces_one_that_dies(lab, tokens, whole, tmp_path):
    scene = begin(lab, tmp_path, tokens, "restarts=2", "spare_nodes=1")
    job = trains(scene, tmp_path, 1)
    training = {node_of(each) for each in ranks(job).values()}
    # The first one has the batch script, and the store of the rendezvous.
    dead = next(each for each in sorted(training) if each != scene.nodes()[0])
    lab.kill_node(dead)
    try:
        scene.finishes(200)
    finally:
        lab.start_node(dead)
    assert len(scene.chain.attempts()) == 1, scene.log()
    assert starts(tmp_path) == [job, job], scene.log()
    check(tmp_path, whole, allowed=INTERVAL)


@pytest.mark.campaign
@pytest.mark.parametrize("place", [0, 1], ids=["the first", "another"])
def test_a_node_that_nobody_replaces_ends_the_attempt(lab, tokens, whole, tmp_path, place):
    scene = begin(lab, tmp_path, tokens, "restarts=2")
    trains(scene, tmp_path, 1)
    dead = scene.nodes()[place]
    lab.kill_node(dead)
    scene.until_ended(1, 120)
    lab.start_node(dead)
    scene.finishes(200)
    assert [end.ending for end in scene.chain.ends().values()] == ["interrupted", "finished"], scene.log()
    check(tmp_path, whole, allowed=INTERVAL)

"""Who owns a root that two nodes want, and who gets it when its owner was killed."""

import signal

import pytest

from tests.filesystems.training import all_are_whole, claim_at_once, finish, restore, running, step_names
from tests.helpers.ranks import RankError, start_ranks


@pytest.mark.slow
def test_of_two_claimants_one_owns_a_root(cluster, root):
    programs = [node.program for node in cluster.nodes]
    with start_ranks(2, claim_at_once, root, 2, programs=programs) as world:
        assert world.results() == [[1, 1], [1, 1]]


@pytest.mark.campaign
def test_of_two_claimants_one_owns_a_root_many_times(cluster, root):
    programs = [node.program for node in cluster.nodes]
    with start_ranks(2, claim_at_once, root, 20, programs=programs, limit=280) as world:
        assert world.results() == [[1] * 20] * 2


@pytest.mark.campaign
def test_a_living_owner_keeps_its_root_and_a_killed_one_loses_it(cluster, root, tmp_path):
    one, two = cluster.nodes
    with running([one], root, tmp_path) as (world, _):
        world.await_message(0, "first saved 3")
        refused = pytest.raises(RankError, match=r"BusyError: .*is being written to by another run \(host node1, pid")
        with start_ranks(1, restore, root, alone=True, programs=[two.program]) as other, refused:
            other.results()
        world.kill(0)
        assert world.wait(0, 60) == -signal.SIGKILL
    newest = max(step_names(one.seen(root)))
    with running([two], root, tmp_path) as (world, phase):
        world.await_message(0, f"restored {int(newest.removeprefix('step-'))}")
        world.await_message(0, "first saved 2")
        finish(world, phase)
    all_are_whole(one, root)


@pytest.mark.campaign
def test_what_a_killed_rank_leaves_is_whole(cluster, root, tmp_path):
    for _ in range(3):
        with running(cluster.nodes, root, tmp_path, retention=3, timeout_seconds=20.0) as (world, _):
            world.await_message(0, "first saved 4")
            world.kill(1)
            with pytest.raises(RankError, match="rank 1 died with exit code -9"):
                world.results()
        all_are_whole(cluster.nodes[1], root)

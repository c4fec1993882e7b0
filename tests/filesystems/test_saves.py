"""Saves and restores by ranks on two nodes."""

import pytest

from tests.filesystems.training import all_are_whole, finish, restored_by, running, step_names

pytestmark = pytest.mark.slow


def test_what_two_nodes_save_any_number_restores(cluster, root, tmp_path):
    one, two = cluster.nodes
    with running([one, two], root, tmp_path) as (world, phase):
        world.await_message(0, "restored 0")
        world.await_message(0, "first saved 5")
        (last, errors), _ = finish(world, phase)
    assert errors == []
    for nodes in ([one, two], [two], [two, one, two]):
        assert restored_by(nodes, root) == last
    all_are_whole(two, root)


def test_a_run_goes_on_where_it_was(cluster, root, tmp_path):
    last = 0
    for nodes in (cluster.nodes, cluster.nodes[::-1], cluster.nodes[1:]):
        with running(nodes, root, tmp_path, async_save=True, retention=3) as (world, phase):
            world.await_message(0, f"restored {last}")
            world.await_message(0, "first saved 5")
            (last, errors), *_ = finish(world, phase)
        assert errors == []
    assert len(step_names(cluster.nodes[0].seen(root))) == 3

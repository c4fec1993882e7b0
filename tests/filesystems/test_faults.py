"""Servers and clients that go and come back while two ranks on two nodes save."""

import os

import pytest

from tests.filesystems.clusters import CephFS, Gluster, MooseFS
from tests.filesystems.training import all_are_whole, finish, restored_by, running

pytestmark = pytest.mark.campaign


def ends_well(cluster, root, world, phase):
    """The run saves again; nothing is lost, and nothing called damaged. Returns the errors of each rank."""
    phase.set("mended")
    world.await_message(0, "mended saved 3")
    (last, first), (_, second) = finish(world, phase)
    for node in cluster.nodes:
        all_are_whole(node, root)
    assert restored_by(cluster.nodes[1:], root) == last
    assert not [each for each in first + second if "damaged" in each or "not what was saved" in each]
    return first, second


def test_one_server_of_two_may_go(cluster, root, tmp_path):
    if not cluster.may_go:
        pytest.skip("there is one server of objects, which keeps them in memory")
    with running(cluster.nodes, root, tmp_path, retention=3) as (world, phase):
        world.await_message(0, "first saved 3")
        for number in cluster.may_go:
            cluster.kill_server(number)
            phase.set(f"without {number}")
            world.await_message(0, f"without {number} saved 5")
            cluster.start_servers()
        assert ends_well(cluster, root, world, phase) == ([], [])


def test_a_master_may_go_for_a_while(cluster, root, tmp_path):
    if isinstance(cluster, Gluster):
        pytest.skip("it has none")
    with running(cluster.nodes, root, tmp_path, retention=3) as (world, phase):
        world.await_message(0, "first saved 3")
        cluster.kill_master()
        phase.set("without")
        cluster.wait(cluster.is_awaited, "no client waits for the master")
        cluster.start_master()
        assert ends_well(cluster, root, world, phase) == ([], [])


def test_all_servers_may_hang_for_a_while(cluster, root, tmp_path):
    with running(cluster.nodes, root, tmp_path, retention=3) as (world, phase):
        world.await_message(0, "first saved 3")
        cluster.servers.freeze()
        cluster.wait(cluster.is_awaited, "no client waits for a server")
        cluster.servers.thaw()
        assert ends_well(cluster, root, world, phase) == ([], [])


def test_saves_fail_while_all_servers_are_gone(cluster, root, tmp_path):
    if isinstance(cluster, MooseFS | CephFS):
        pytest.skip("its clients wait until they are back")
    with running(cluster.nodes, root, tmp_path, retention=3) as (world, phase):
        world.await_message(0, "first saved 3")
        for number in (1, 2):
            cluster.kill_server(number)
        phase.set("without")
        world.await_message(0, "without failed 2")
        cluster.start_servers()
        first, second = ends_well(cluster, root, world, phase)
    assert len(first) == len(second) >= 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_client_dies(cluster, root, tmp_path, rank):
    node = cluster.nodes[rank]
    with running(cluster.nodes, root, tmp_path, retention=3) as (world, phase):
        world.await_message(0, "first saved 3")
        node.kill_client()
        phase.set("without")
        world.await_message(0, "without failed 2")
        below = node.mount_again()
        first, second = ends_well(cluster, root, world, phase)
    assert below == []
    assert len(first) == len(second) >= 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_mount_goes_and_comes_back(cluster, root, tmp_path, rank):
    """Nothing is written below the mount point, and each rank says why it saves nothing."""
    node = cluster.nodes[rank]
    with running(cluster.nodes, root, tmp_path, retention=3) as (world, phase):
        world.await_message(0, "first saved 3")
        node.unmount()
        phase.set("without")
        world.await_message(0, "without failed 2")
        below = node.mount_again()
        errors = ends_well(cluster, root, world, phase)
    assert below == []
    for each in errors:
        assert len(each) >= 2
        assert [error for error in each if "see whether it is still mounted" not in error] == []


@pytest.mark.timeout(2400)
def test_the_fault_campaign_holds_on_a_mount(cluster, root):
    """A part of each kind that changes files: nothing is lost, and nothing damaged is loaded."""
    cluster.nodes[0].seen(root).mkdir()
    command = ("-m", "tests.faults", "--share", "0.03", "--only", "kill,crash,flips,files,io,user")
    told = cluster.nodes[0].python(*command, env=os.environ | {"TMPDIR": str(root)}, timeout=2300)
    print(told.stdout)
    assert told.returncode == 0, told.stdout[-20_000:] + told.stderr[-5_000:]

"""The tests of what reads and writes files, with their folders on the mount of a node."""

import pytest

FOLDERS = (
    "storage/catalog",
    "engine/saving",
    "storage/io",
    "tools/doctor",
    "storage/transfer",
    "cli/test_prune.py",
    "cli/test_list.py",
    "cli/test_verify.py",
)
pytestmark = [pytest.mark.campaign, pytest.mark.timeout(2400)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_they_hold_on_a_mount(cluster, root, folder):
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={root}", f"tests/{folder}")
    told = cluster.nodes[0].python(*command, timeout=2300)
    assert told.returncode == 0, told.stdout[-20_000:]

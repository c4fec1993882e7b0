"""`ckptman doctor` on a healthy mount: it ends, and finds no fault."""

import pytest

pytestmark = pytest.mark.campaign


def test_a_healthy_mount_is_safe(cluster, root):
    cluster.nodes[0].seen(root).mkdir()
    for node in cluster.nodes:
        for _ in range(2):
            told = node.ckptman("doctor", root, "--size", "8MiB")
            assert told.returncode == 0, told.stdout + told.stderr

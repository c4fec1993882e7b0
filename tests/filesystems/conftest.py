"""Each of the file systems, once for all tests. Where one is not installed they are skipped, and told why."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.filesystems.clusters import CLUSTERS, Refused

MUST_ENV = "CKPTMAN_TEST_FILESYSTEMS"
"""must: a machine without their programs fails these tests instead of skipping them."""
QUICK = "moosefs"
"""Installed and started the quickest: that of the tests that are no campaign."""


def pytest_generate_tests(metafunc):
    if "cluster" in metafunc.fixturenames:
        kinds = [pytest.param(kind, marks=() if kind == QUICK else pytest.mark.campaign) for kind in CLUSTERS]
        metafunc.parametrize("cluster", kinds, indirect=True, scope="session")


@pytest.fixture(scope="session")
def cluster(request):
    kind = CLUSTERS[request.param]
    if absent := kind.missing():
        why = f"not installed: {', '.join(absent)} (Debian: apt-get install {kind.packages})"
        if os.environ.get(MUST_ENV) == "must":
            pytest.fail(why)
        pytest.skip(why)
    folder = Path(tempfile.mkdtemp(prefix="ckptman-fs-", dir="/tmp"))  # paths of sockets are short
    try:
        with kind(folder) as there:
            yield there
    except Refused as error:
        pytest.skip(f"this machine lets nobody mount {request.param}: {error}")


@pytest.fixture
def root(cluster, tmp_path):
    """A root on the file system; what is in it goes with the test."""
    path = cluster.path / tmp_path.name
    yield path
    for node in cluster.nodes:
        if not node.is_mounted():
            node.mount_again()
    shutil.rmtree(cluster.nodes[0].seen(path), ignore_errors=True)

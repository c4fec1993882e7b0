"""One cluster for all tests of this folder. Where Slurm is not installed they are skipped, and told why."""

import os
import tempfile
from pathlib import Path

import pytest

from ckptman.train.tokenize import tokenize
from tests.slurm.bundled import begin, script
from tests.slurm.cluster import Cluster, missing

MUST_ENV = "CKPTMAN_TEST_SLURM"
"""must: a machine without Slurm fails these tests instead of skipping them."""


@pytest.fixture(scope="session")
def cluster():
    if absent := missing():
        why = f"not installed: {', '.join(absent)} (Debian: apt-get install slurmctld slurmd slurm-client munge)"
        if os.environ.get(MUST_ENV) == "must":
            pytest.fail(why)
        pytest.skip(why)
    # Paths of sockets have at most 108 characters.
    made = Cluster(Path(tempfile.mkdtemp(prefix="ckptman-slurm-", dir="/tmp")))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A test that failed shows what its jobs and the daemons wrote."""
    report = yield
    if report.failed and call.when == "call" and (lab := item.funcargs.get("lab")):
        report.sections.append(("what the jobs and the daemons wrote", lab.last_words(item.funcargs["tmp_path"])))
    return report


@pytest.fixture
def lab(cluster, tmp_path, monkeypatch):
    """The cluster, with this process as one of its users; and nothing left in its queue afterwards."""
    monkeypatch.chdir(tmp_path)
    for name, value in cluster.environ.items():
        monkeypatch.setenv(name, value)
    assert cluster.queue() == {}
    yield cluster
    if left := cluster.queue():
        cluster.ask("scancel", *left)
        cluster.wait(lambda: not cluster.queue(), 60, "the queue is not empty")


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text").write_text(Path(__file__).with_name("cluster.py").read_text())
    tokenize(folder / "tokens", [folder / "text"], vocab_size=300, workers=1)
    return folder / "tokens"


@pytest.fixture(scope="session")
def whole(tokens, cluster, tmp_path_factory):
    """The folder of a run of the bundled loop that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, value in cluster.environ.items():
            patch.setenv(name, value)
        scene = begin(cluster, script(folder, tokens))
        scene.finishes(120)
    assert len(scene.chain.attempts()) == 1
    return folder

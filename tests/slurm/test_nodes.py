"""Bad nodes and arrays on a real Slurm: the next attempt is elsewhere, and each task has a chain of its own."""

import pytest

from ckptman.cli.app import main
from ckptman.jobs.chain_record import find_chains
from tests.helpers.scenarios import script, submit
from tests.slurm.cluster import CRED_SECONDS

pytestmark = pytest.mark.timeout(600)


def ended(lab, timeout_seconds=60):
    lab.wait(lambda: not lab.queue(), timeout_seconds, "the chain goes on")


@pytest.mark.parametrize("mode", [[], ["--upfront", "3"], ["--requeue"]], ids=["successor", "upfront", "requeue"])
def test_the_next_attempt_leaves_out_the_nodes_that_were_reported(lab, tmp_path, mode):
    body = """
    echo "ECC errors" > "$CKPTMAN_OUTCOME.node-$SLURMD_NODENAME"
    [ "$CKPTMAN_ATTEMPT" = 3 ] || exit 75
    """
    chain = submit(script(tmp_path, body), *mode)
    ended(lab, 30 + 3 * CRED_SECONDS)
    assert chain.state.state == "finished"
    assert len({each.nodes for each in chain.attempts()}) == 3


def test_no_attempt_waits_for_nodes_that_are_left_out(lab, tmp_path):
    body = """
    echo bad > "$CKPTMAN_OUTCOME.node-$SLURMD_NODENAME"
    [ "$CKPTMAN_ATTEMPT" = 3 ] || exit 75
    """
    chain = submit(script(tmp_path, body, "--nodes=4"))
    ended(lab)
    assert chain.state.state == "finished"
    assert "without them it could not run now" in (tmp_path / "log").read_text()


def test_an_exclusion_ends_where_the_nodes_are_needed(lab, tmp_path):
    """Another node is drained meanwhile: sbatch would still take the exclusion, and the job would wait for ever."""
    body = """
    echo bad > "$CKPTMAN_OUTCOME.node-$SLURMD_NODENAME"
    [ "$CKPTMAN_ATTEMPT" = 1 ] && touch there && while [ ! -e drained ]; do sleep 0.1; done
    [ "$CKPTMAN_ATTEMPT" = 2 ] || exit 75
    """
    chain = submit(script(tmp_path, body, "--nodes=3"))
    lab.wait((tmp_path / "there").exists, 30, "it does not run")
    lab.ask("scontrol", "update", f"nodename={lab.nodes[3]}", "state=drain", "reason=test")
    try:
        (tmp_path / "drained").touch()
        ended(lab)
    finally:
        lab.ask("scontrol", "update", f"nodename={lab.nodes[3]}", "state=resume")
    assert chain.state.state == "finished"


def test_a_node_that_died_is_left_out(lab, tmp_path):
    body = '[ "$CKPTMAN_ATTEMPT" = 1 ] || exit 0; touch there; sleep 60 & wait'
    chain = submit(script(tmp_path, body, "--nodes=2", "--no-requeue"))
    lab.wait((tmp_path / "there").exists, 30, "it does not run")
    second = lab.ask("scontrol", "show", "hostnames", chain.attempts()[0].nodes).split()[1]
    lab.kill_node(second)
    lab.wait(lambda: len(chain.attempts()) == 2, 60, "no second attempt")
    lab.start_node(second)
    ended(lab)
    lab.wait(lambda: len(lab.idle()) == len(lab.nodes), 240, "not all nodes are idle")
    assert second in chain.ends()[1].bad_nodes
    assert second not in lab.ask("scontrol", "show", "hostnames", chain.attempts()[1].nodes).split()


def test_each_task_of_an_array_is_a_chain(lab, tmp_path):
    body = 'echo "$SLURM_ARRAY_TASK_ID" >> "task-$SLURM_ARRAY_TASK_ID"; [ "$CKPTMAN_ATTEMPT" = 2 ] || exit 75'
    assert main(["submit", str(script(tmp_path, body, "--array=1,3"))]) == 0
    ended(lab)
    assert [(each.spec.array_task, each.state.state, len(each.attempts())) for each in find_chains(tmp_path)] == [
        (1, "finished", 2),
        (3, "finished", 2),
    ]
    assert (tmp_path / "task-1").read_text() == "1\n1\n"
    assert (tmp_path / "task-3").read_text() == "3\n3\n"

"""Notes of what happens to a chain, by a command of the user."""

import errno
import json

from ckptman.jobs.chain_notes import notes_of
from ckptman.runtime.journal import read_journal
from ckptman.storage.io.durable_files import DISK
from tests.helpers.slurm_chains import attempt, begin_and_be_killed, outcome, submitted, supervisor


def noted(chain, fake, number, tmp_path, say=print, **environ):
    """Run a job as its batch script does: the events that its notifier was told of, and the notes."""
    path = tmp_path / f"notes-{number}"
    with notes_of(chain, f"cat >> {path}", say):
        supervisor(chain, fake, number, **environ).run()
    notes = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {each["event"] for each in notes}, notes


def test_a_note_of_a_crash_and_none_of_the_next_one_soon_after(tmp_path, fake):
    crash = outcome("failed", "/r", 7, "token=hf_" + "a1" * 15) + "\nexit 1"
    chain = submitted(tmp_path, fake, crash, notify="unused", on={"repeat": "count"})
    events, [note] = noted(chain, fake, 1, tmp_path)
    assert events == {"crashed"}
    assert (note["attempt"], note["job_id"], note["step"], note["root"]) == (1, "101", 7, "/r")
    assert note["chain"] == str(chain.folder)
    assert note["line"] == f"attempt 1 of chain {chain.folder.name} crashed: token=***"
    assert noted(chain, fake, 2, tmp_path)[0] == set(), "there was one just now"
    assert noted(chain, fake, 3, tmp_path)[0] == {"stopped"}, "the end is told in any case"


def test_no_note_of_an_attempt_that_saved_and_stopped(tmp_path, fake):
    chain = submitted(tmp_path, fake, "exit 75")
    assert noted(chain, fake, 1, tmp_path)[0] == set()


def test_a_note_of_the_end_although_the_folder_of_the_chain_is_full(tmp_path, fake, monkeypatch):
    chain = submitted(tmp_path, fake, "exit 0")

    def full(path, data):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(DISK, "replace_file", full)
    assert noted(chain, fake, 1, tmp_path)[0] == {"finished"}


def test_a_note_of_a_bad_node(tmp_path, fake):
    chain = submitted(tmp_path, fake, 'echo "an Xid" > "$CKPTMAN_OUTCOME.node-n1"; exit 75')
    fake.plan("scontrol", (0, "n1\n", ""))
    events, notes = noted(chain, fake, 1, tmp_path)
    assert events == {"bad_node"}
    assert notes[0]["reason"] == "n1: an Xid"
    assert notes[0]["line"] == f"attempt 1 of chain {chain.folder.name}: node n1 is bad: an Xid"


def test_a_note_of_an_attempt_that_was_killed_comes_from_the_next_one(tmp_path, fake):
    chain = submitted(tmp_path, fake, "exit 75")
    begin_and_be_killed(chain, fake)
    fake.plan("squeue", (0, "101|FAILED|NonZeroExitCode||x\n102|RUNNING|None||x\n", ""))
    events, [note] = noted(chain, fake, 2, tmp_path)
    assert events == {"crashed"}
    assert (note["attempt"], note["job_id"]) == (1, "101")


def test_the_run_gets_the_command_of_the_chain(tmp_path, fake):
    chain = submitted(tmp_path, fake, f'printf %s "$CKPTMAN_NOTIFY" > {tmp_path}/seen', notify="tell them")
    attempt(chain, fake, 1)
    assert (tmp_path / "seen").read_text() == "tell them"


def test_a_notifier_that_fails_leaves_a_line_and_an_event(tmp_path, fake):
    chain, said = submitted(tmp_path, fake, "exit 0"), []
    with notes_of(chain, "echo no route >&2; exit 9", said.append):
        assert attempt(chain, fake, 1)[0] == 0
    assert [line for line in said if "--notify failed (exit code 9: no route)" in line]
    assert chain.state.state == "finished"
    events, _ = read_journal(chain.events.path)
    assert [each["why"] for each in events if each["event"] == "notify failed"] == ["exit code 9: no route"]


def test_a_note_is_handed_on_before_the_job_requeues_itself(tmp_path, fake):
    chain = submitted(tmp_path, fake, "exit 1", mode="requeue")
    with notes_of(chain, f"cat {fake.folder}/calls.jsonl > {tmp_path}/before", print):
        attempt(chain, fake, 1)
    assert ["requeue", "101"] in fake.argv("scontrol")
    assert '"requeue", "101"' not in (tmp_path / "before").read_text()

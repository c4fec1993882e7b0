"""`ckptman chain` for chains of this machine; `chain logs` from one attempt to the next; `chain why`."""

import json
import os
import socket
import sys
from pathlib import Path

import psutil
import pytest

from ckptman.cli import chain_logs
from ckptman.cli.app import main
from ckptman.jobs.chain_record import AttemptRecord, Chain, EndRecord, Spec
from tests.helpers.forkserver import run


class Scene:
    """A chain whose attempts print into files. What happens while a log is followed is a step between two looks."""

    def __init__(self, folder):
        self.log = folder / "out.log"
        (folder / "chain").mkdir()
        own = psutil.Process()
        process = {"host": socket.gethostname(), "pid": own.pid, "pid_started": own.create_time()}
        command = {"script": "train", "interpreter": (), "workdir": str(folder), "created_seconds": 1.0}
        self.chain = Chain(folder / "chain")
        self.chain.start_local(Spec(scheduler="local", **process, **command))

    def begin(self, number, log=None):
        path = log or self.log
        size = path.stat().st_size if path.exists() else 0
        facts = {"number": number, "job": 0, "job_id": "", "restart": 0, "nodes": "n", "host": "n"}
        self.chain.begin(AttemptRecord(**facts, begun_seconds=1.0, log=str(path), log_begin=size))

    def print(self, text):
        with self.log.open("ab") as file:
            file.write(text if isinstance(text, bytes) else text.encode())

    def end(self, number):
        facts = {"root": "", "step": 0, "sequence": 0, "ended_seconds": 2.0, "returncode": 75, "reason": "exit code 75"}
        self.chain.end(EndRecord(number=number, ending="stopped", **facts))

    def finish(self):
        self.chain.turn("finished", "the run ended", 3.0)


@pytest.fixture
def scene(tmp_path):
    return Scene(tmp_path)


@pytest.fixture
def follow(scene, monkeypatch, capsys):
    """Follow the chain while steps are taken, one whenever the command would sleep."""

    def run(steps):
        monkeypatch.setattr(chain_logs.time, "sleep", lambda seconds: next(steps))
        code = main(["chain", "logs", str(scene.chain.folder), "-f"])
        printed = capsys.readouterr()
        assert not list(steps), "the command ended too early"
        return code, printed.out.splitlines(), printed.err

    return run


@pytest.mark.leaves("events.jsonl")  # that of a chain which a fixture holds
def test_follow_goes_from_attempt_to_attempt_in_one_file_and_ends_with_the_chain(scene, follow):
    scene.print("of somebody before\n")

    def steps():
        yield scene.begin(1)
        yield scene.print("one\ntw")
        yield scene.print("o\n")
        scene.print("unended")
        scene.end(1)
        scene.begin(2)  # between two looks
        yield scene.print("\nthree\n")
        yield scene.end(2)
        yield scene.begin(3)
        scene.end(3)
        yield scene.finish()

    title = f": {scene.log} <=="
    assert follow(steps()) == (
        0,
        [
            *(f"==> attempt 1{title}", "one", "two", "unended", f"==> attempt 2{title}", "", "three"),
            *(f"==> attempt 3{title}", "==> finished: the run ended <=="),
        ],
        "",
    )


@pytest.mark.leaves("events.jsonl")  # that of a chain which a fixture holds
def test_a_log_may_come_late_be_rotated_be_cut_and_be_removed(scene, follow):
    def steps():
        yield scene.begin(1)
        yield
        yield scene.print("first\nof the old")
        scene.log.rename(scene.log.with_suffix(".1"))
        yield scene.print("new\n")
        yield os.truncate(scene.log, 0)
        yield scene.print("cut\n")
        yield scene.log.unlink()
        yield
        scene.end(1)
        yield scene.finish()

    code, told, error = follow(steps())
    anew = "==> the log was replaced, or cut: from its beginning <=="
    assert (code, told[1:-1]) == (0, ["first", "of the old", anew, "new", anew, "cut"])
    assert error == f"{scene.log} is not there yet\n"


def test_what_a_terminal_would_obey_is_shown(scene, ends):
    scene.begin(1)
    scene.print(b"\x1b[31mred\x1b[0m\tx\n 10%\r 90%\r\n\xff\x00\x1b]0;title\x07\n" + b"y" * 200_000)
    told = ends(0, "chain", "logs", scene.chain.folder).out.splitlines()
    assert told[1:4] == ["red     x", " 90%", "\ufffd\\x00\\x1b]0;title\\x07"]
    assert sum(map(len, told[4:])) == 200_000


def test_without_follow_the_last_lines_of_one_attempt(scene, capsys, ends):
    for number in (1, 2):
        scene.begin(number)
        scene.print("".join(f"{number}-{line}\n" for line in range(20_000)))
        scene.end(number)
    logs = ["chain", "logs", str(scene.chain.folder), "--lines"]
    assert ends(0, *logs, "2").out.splitlines()[1:] == ["2-19998", "2-19999"]
    assert ends(0, *logs, "30000", "--attempt", "1").out.splitlines()[1:] == [f"1-{line}" for line in range(20_000)]
    scene.log.unlink()
    assert main(logs[:-1]) == 3
    assert "is not there: was it moved?" in capsys.readouterr().err
    assert "has no attempt 3: it has 2 attempts" in ends(3, *logs, "2", "--attempt", "3").err


def test_no_file_no_process_and_ctrl_c_are_told_in_a_line(scene, follow, ends, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt
        yield

    assert "no attempt has begun yet" in ends(3, "chain", "logs", scene.chain.folder).err
    assert follow(interrupted())[0] == 130
    scene.begin(1, Path("/dev/null"))
    assert follow(iter(()))[0] == 2
    gone = scene.chain.spec.model_copy(update={"pid_started": 1.0})
    scene.chain.start_local(gone)
    scene.begin(1)
    scene.print("last words\n")
    code, told, error = follow(iter(()))
    assert (code, told[1:], error.count("\n")) == (3, ["last words"], 1)
    assert f"process {gone.pid}, which ran the chain, is gone" in error
    assert f"process {gone.pid}, which ran it, is gone" in ends(0, "chain", "show", scene.chain.folder).out


def test_a_chain_of_this_machine_is_shown_and_not_for_slurm(tmp_path, monkeypatch, ends):
    monkeypatch.chdir(tmp_path)
    program = "import os, sys; n = os.environ['CKPTMAN_ATTEMPT']; print('attempt', n); sys.exit(75 * (n == '1'))"
    with open("out.log", "w") as log:
        command = ["submit", "--scheduler", "local", "--", sys.executable, "-S", "-c", program]
        run("-m", "ckptman", *command, stdout=log, check=True)
    told = ends(0, "chain", "list").out.splitlines()[1]
    assert told.split()[-2:] == ["local", "finished"]
    shown = json.loads(ends(0, "chain", "show", "--json").out)
    assert (shown["scheduler"], shown["state"], shown["queue"]) == ("local", "finished", [])
    assert [each["end"]["ending"] for each in shown["attempts"]] == ["stopped", "finished"]
    assert "finished: exit code 0" in ends(0, "chain", "show").out
    told_lines = ends(0, "chain", "logs", "-f").out.splitlines()
    assert told_lines[1:3] == ["attempt 2", "ckptman: attempt 2 finished: exit code 0"]
    for verb in ("pause", "resume", "cancel"):
        assert "is not a chain of Slurm jobs" in ends(2, "chain", verb).err
    folder = next(Path("ckptman-chains").glob("*-*"))
    assert main(["submit", "--scheduler", "local", "--chain-dir", str(folder), "--", "true"]) == 0


@pytest.fixture
def chain(tmp_path, monkeypatch):
    """A chain that the same error has stopped, in its second attempt."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ckptman.jobs.evidence._file_of", lambda _: (str(tmp_path / "log"), 0))
    line = "echo 'KeyError: 1' >> log; exit 1"
    options = ["--scheduler", "local", "--crash-limit", "3", "--chain-dir", "ckptman-chains/c"]
    assert main(["submit", *options, "--", "bash", "-c", line]) == 8


def test_an_end_is_explained(chain, ends):
    lines = ends(0, "chain", "why").out.splitlines()
    assert lines[0] == "c: stopped"
    assert lines[1].startswith("attempt 2 crashed after ")
    assert [line.split()[0] for line in lines[2:]] == ["cause", "log", "reaction", "next"]
    assert lines[2] == "  cause     KeyError: 1 [exception]"
    assert lines[4] == "  reaction  the chain stops: the same error twice in a row, without a new checkpoint"
    assert lines[5] == "  next      correct the program or its data; then submit the command again"
    told = json.loads(ends(0, "chain", "why", "c", "--json").out)
    assert (told["cause"], told["reaction"], told["number"]) == ("exception", "hold", 2)
    assert "counts towards the limit of 3 crashes" in ends(0, "chain", "why", "--attempt", "1").out


def test_an_attempt_that_has_not_ended_or_does_not_exist(chain, ends, tmp_path):
    assert "has no attempt 7" in ends(3, "chain", "why", "--attempt", "7").err
    (tmp_path / "ckptman-chains/c/ended-0002.json").unlink()
    assert "attempt 2 of c has not ended" in ends(3, "chain", "why", "--attempt", "2").err
    (tmp_path / "ckptman-chains/c/ended-0001.json").unlink()
    assert "no attempt of c has ended" in ends(3, "chain", "why").err

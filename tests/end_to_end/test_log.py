"""What a whole run says: rank 0 alone, at once when a signal comes, and at exit when nobody closed it."""

import contextlib
import gc
import json
import logging
import math
import os
import re
import signal
import subprocess
import textwrap
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

import ckptman
from tests.helpers.apps import App
from tests.helpers.forkserver import Python
from tests.helpers.ranks import run_ranks

SCRIPT = """
    import os, sys
    import torch
    import ckptman

    state = {"model": torch.nn.Linear(2, 2)}
"""


@contextlib.contextmanager
def process(body, folder):
    """A script of a user in a process of its own."""
    unwanted = ("CKPTMAN_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    code, pipe = textwrap.dedent(SCRIPT) + textwrap.dedent(body), subprocess.PIPE
    with Python("-c", code, cwd=folder, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environ) as running:
        try:
            yield running
        finally:
            running.kill()


def ended(body, folder):
    """The exit code of a script, and the lines it wrote to standard error."""
    with process(body, folder) as running:
        _, err = running.communicate(timeout=240)
    return running.returncode, err.splitlines()


def lines_of(root, until, stop_at):
    """What this rank logs in one attempt, where rank 1 gets SIGTERM at a step."""
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("ckptman")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    app = App((2,))
    with ckptman.Checkpointer(
        root, app.state, save_policy=ckptman.EverySteps(2) | ckptman.OnStop(), signals=True, async_save=False
    ) as checkpointer:
        for step in range(checkpointer.restore() + 1, until + 1):
            app.train_step()
            if step == stop_at and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            checkpointer.step(step)
            if checkpointer.should_stop():
                break
    logger.removeHandler(handler)
    return told


def test_rank_0_says_what_happens_and_the_others_nothing(tmp_path):
    first, silent = run_ranks(2, lines_of, str(tmp_path), 9, 3)
    assert silent == []
    stopped = int(re.findall(r"step (\d+)", first[-1])[0])
    size = r"[\d.]+ KiB in [\d.]+ m?s \(training waited [\d.]+ m?s\)"
    expected = [
        f"fresh start: {tmp_path} holds no checkpoint yet",
        rf"saved step 2, {size}: every 2 steps",
        rf"saved step {stopped}, {size}: (every 2 steps; )?stop asked: SIGTERM on rank 1",
        rf"stopping after step {stopped}: SIGTERM on rank 1",
        rf"stopped after step {stopped} \(SIGTERM on rank 1\): exit code 75, start it again to go on",
    ]
    assert all(re.fullmatch(pattern, line) for pattern, line in zip(expected, first, strict=True)), first
    second, silent = run_ranks(2, lines_of, str(tmp_path), 6, None)
    assert silent == []
    assert re.fullmatch(rf"restored step {stopped} from {tmp_path}/step-\d+ in [\d.]+ m?s", second[0])
    assert second[-1] == "finished after step 6: exit code 0"


def test_ctrl_c_is_answered_at_once(tmp_path):
    body = """
        with ckptman.Checkpointer("root", state, save_policy=ckptman.OnStop(), signals=True) as checkpointer:
            for step in range(checkpointer.restore() + 1, 10):
                print(step, flush=True)
                if step == 2:
                    sys.stdin.readline()  # a step that is not over before the test has read what was said
                checkpointer.step(step)
                if checkpointer.should_stop():
                    break
        sys.exit(checkpointer.exit_code)
    """
    with process(body, tmp_path) as running:
        assert [running.stdout.readline() for _ in range(2)] == ["1\n", "2\n"]
        assert running.stderr.readline() == "ckptman: fresh start: root holds no checkpoint yet\n"
        running.send_signal(signal.SIGINT)
        assert running.stderr.readline() == (
            "ckptman: SIGINT received: saving after this step or the next, then exit code 75; a second one, 3 s later "
            "or more, ends the process at once\n"
        )
        _, err = running.communicate("\n", timeout=240)
    assert running.returncode == 75, err
    said = [line.split(" after step")[0] for line in err.splitlines()]
    assert said[-1] == "ckptman: stopped"
    assert "ckptman: stopping" in said


def test_a_run_that_nobody_closed_says_so_once_at_exit(tmp_path):
    body = """
        checkpointer = ckptman.Checkpointer("root", state, save_policy=ckptman.EverySteps(1), signals=True)
        checkpointer.restore()
        checkpointer.step(1)
        checkpointer.wait()
        if os.fork() == 0:
            sys.exit(0)
        os.wait()
        sys.exit(checkpointer.exit_code)
    """
    code, lines = ended(body, tmp_path)
    assert code == 0
    assert [line for line in lines if "close()" in line] == [
        "ckptman: the run in root ends without close(): it leaves no outcome for a chain to go by, and its last step "
        "may not be saved. Use the Checkpointer in a `with` block, or call close()"
    ], lines


@pytest.mark.parametrize("end", ["raise ValueError('bad batch')", "os._exit(13)", "checkpointer.close()"])
def test_a_run_that_ended_otherwise_does_not(end, tmp_path):
    code, lines = ended(f"checkpointer = ckptman.Checkpointer('root', state)\n{end}", tmp_path)
    assert code == {"r": 1, "o": 13, "c": 0}[end[0]]
    assert not [line for line in lines if "ends without close()" in line]


@pytest.mark.leaves("ckptman-")
def test_a_checkpointer_that_nobody_has_any_more_is_collected_and_gives_the_signals_back(tmp_path, caplog):
    before = signal.getsignal(signal.SIGTERM)
    checkpointer = ckptman.Checkpointer(tmp_path, App().state, signals=True)
    gone = weakref.ref(checkpointer)
    del checkpointer
    gc.collect()
    assert gone() is None
    assert signal.getsignal(signal.SIGTERM) == before
    assert "ends without close()" in caplog.text


@pytest.mark.parametrize("end", ["close", "with", "fail", "refused"])
def test_signals_true_takes_the_signals_and_gives_them_back(end, tmp_path):
    def handlers():
        return [signal.getsignal(number) for number in ckptman.SignalHandler().signals]

    def made():
        return ckptman.Checkpointer(tmp_path, App().state, signals=True)

    before = handlers()
    if end == "close":
        checkpointer = made()
        assert handlers() != before
        checkpointer.close()
        checkpointer.close()
    elif end == "refused":
        (tmp_path / ".ckptman").write_text("no folder")
        with pytest.raises(ckptman.CkptmanError):
            made()
    else:
        with contextlib.suppress(ValueError), made():
            assert handlers() != before
            if end == "fail":
                raise ValueError("bad batch")
    assert handlers() == before


def test_a_handler_that_notes_nothing_is_refused(tmp_path):
    handler = ckptman.SignalHandler()
    with pytest.raises(ckptman.ConfigError, match="never entered"):
        ckptman.Checkpointer(tmp_path, App().state, signals=handler)
    with handler, ckptman.Checkpointer(tmp_path, App().state, signals=handler):
        pass
    with pytest.raises(ckptman.ConfigError, match="its block has ended"):
        ckptman.Checkpointer(tmp_path, App().state, signals=handler)
    with pytest.raises(ckptman.ConfigError, match="or False to listen to none"):
        ckptman.Checkpointer(tmp_path, App().state, signals="SIGTERM")


def test_signals_true_is_for_the_main_thread(tmp_path):
    def make():
        ckptman.Checkpointer(tmp_path, App().state, signals=True)

    with ThreadPoolExecutor(1) as pool, pytest.raises(ckptman.ConfigError, match="only the main thread can"):
        pool.submit(make).result()


def test_a_deadline_that_is_past_or_never_comes_is_told_as_such(tmp_path, caplog):
    caplog.set_level(logging.INFO, "ckptman")
    for deadline in (math.inf, 3600.0):
        with ckptman.Checkpointer(tmp_path, App().state, save_policy=ckptman.OnStop(), deadline=deadline):
            pass
    told = [message for message in caplog.messages if message.startswith("the job")]
    assert len(told) == 1
    assert re.fullmatch(r"the job was to end [\d,]+ s ago \(deadline= is a unix time\)", told[0])


def test_a_deadline_and_a_save_that_failed_are_news(tmp_path, caplog):
    caplog.set_level(logging.INFO, "ckptman")
    journal = tmp_path / ".ckptman" / "journal.jsonl"
    journal.parent.mkdir()
    began = {"time": 1.0, "event": "attempt_started", "attempt": 1}
    saved = {"time": 1e9 + 9, "event": "save_durable", "attempt": 1, "step": 1, "seconds": 900.0, "reason": "asked for"}
    journal.write_text("".join(json.dumps(each) + "\n" for each in (began, saved)))
    with (
        pytest.raises(ckptman.CommitError),
        ckptman.Checkpointer(
            tmp_path, App().state, save_policy=ckptman.OnStop(), deadline=time.time() + 600, async_save=False
        ) as checkpointer,
    ):
        checkpointer.restore()
        (tmp_path / "step-0000000001").write_text("in the way")
        checkpointer.save(1)
    assert re.fullmatch(r"the job ends in \d+ s, which is too short for a save of 900 s", caplog.messages[0])
    failures = [message for message in caplog.messages if message.startswith("the save of step 1 failed on rank 0: ")]
    assert len(failures) == 1
    assert caplog.messages[-1] == "failed after step 0 with CommitError"

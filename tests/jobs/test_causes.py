"""Why attempts ended, from their logs: the first cause, not the loudest."""

import pytest

from ckptman.errors import ConfigError
from ckptman.jobs.causes import CRASHES, RULES, Cause, asked_by, cause_of_crash, parse_reactions, with_reaction

GLOO = (
    "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:24775. This is typically caused by a remote worker crashing. GLHF!"
)
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 12, in <module>\n    main()'
WATCHDOG = (
    "[rank1]:[E1130 02:11:09.1 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 600020 milliseconds before timing out."
)
TORCHRUN = """\
E1130 02:11:09.100000 4711 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: -9) local_rank: 1 \
(pid: 4712) of binary: /v/bin/python
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Root Cause (first observed failure):
[0]:
  host      : n2
  rank      : 5 (local_rank: 1)
  exitcode  : -9 (pid: 4712)"""


ROOT_CAUSE = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"


@pytest.mark.parametrize(
    ("log", "reported", "name", "line"),
    [
        # A rank raises: another one loses it and reports that.
        (
            f"{TRACEBACK}\nValueError: the data is not there\n{TRACEBACK}\n{GLOO}\n"
            "srun: error: n1: task 1: Exited with exit code 1\nsrun: error: n1: task 0: Terminated",
            GLOO,
            "exception",
            "ValueError: the data is not there",
        ),
        (
            f"[rank1]: {TRACEBACK}\n[rank1]: ValueError: no data\n[rank0]: {GLOO}",
            GLOO,
            "exception",
            "rank 1: ValueError: no data",
        ),
        (f"0: {GLOO}\n1: KeyError: 'text'", GLOO, "exception", "rank 1: KeyError: 'text'"),
        ("", "ValueError: the loss is NaN", "exception", "ValueError: the loss is NaN"),
        # A process is killed: its rank alone knows nothing.
        (
            f"{GLOO}\nsrun: error: n1: task 1: Segmentation fault\nsrun: error: n1: task 0: Exited with exit code 1",
            GLOO,
            "signal",
            "rank 1 was killed by SIGSEGV",
        ),
        (f"{GLOO}\nsrun: error: n2: tasks 4-7: Killed", GLOO, "signal", "ranks 4-7 were killed by SIGKILL"),
        (f"{GLOO}\n{TORCHRUN}", GLOO, "signal", "local rank 1 was killed by SIGKILL"),
        (
            "script: line 4:  4711 Segmentation fault      python a.py",
            "",
            "signal",
            "the program was killed by SIGSEGV",
        ),
        # The kernel killed it.
        (
            "srun: error: n1: task 1: Killed\nslurmstepd: error: Detected 1 oom_kill event in StepId=7.0. "
            "Some of the step tasks have been OOM Killed.",
            GLOO,
            "host-oom",
            "the job ran out of host memory: slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.",
        ),
        ("", "MemoryError: Unable to allocate 2 GiB", "host-oom", "the job ran out of host memory: MemoryError"),
        (
            "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            "",
            "oom",
            "a GPU ran out of memory: rank 3: torch.OutOfMemoryError: CUDA out of memory.",
        ),
        ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1 GiB", "", "oom", "a GPU ran out of memory"),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "", "ecc", "a GPU is faulty"),
        ("kernel: NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.", "", "ecc", "a GPU is faulty"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "", "gpu", "a GPU reported an error"),
        ("RuntimeError: HIP error: invalid device function", "", "gpu", "a GPU reported an error"),
        (WATCHDOG, "", "nccl", "a collective timed out or failed: reported by rank 1: "),
        (f"{TRACEBACK}\nValueError: bad\n{WATCHDOG}", "", "exception", "ValueError: bad"),
        (
            "",
            "CommitError: rank 0: OSError: [Errno 28] No space left on device. Earlier checkpoints are untouched",
            "space",
            "no space or quota is left: CommitError: rank 0",
        ),
        ("OSError: [Errno 122] Disk quota exceeded: 'x'", "", "space", "no space or quota is left"),
        ("ModuleNotFoundError: No module named 'megatron.core'", "", "import", "a module or library is missing"),
        (
            "ImportError: libcudart.so.12: cannot open shared object file",
            "",
            "import",
            "a module or library is missing",
        ),
        (
            "/usr/bin/python3: can't open file '/w/trian.py': [Errno 2] No such file",
            "",
            "import",
            "a module",
        ),
        ('  File "train.py", line 3\n    x = = 2\nSyntaxError: invalid syntax', "", "import", "a module"),
        ("OSError: [Errno 98] Address already in use", "", "port", "a port is taken"),
        ("OSError: [Errno 116] Stale file handle: '/s/ck'", "", "filesystem", "a file system is gone"),
        ("OSError: [Errno 5] Input/output error: '/s/data'", "", "filesystem", "a file system is gone"),
        ("", "BusyError: ck is being written to by another run", "busy", "another run writes to the root"),
        ("", "Stalled: no sign of life for 10 s in the step after step 12", "hang", "Stalled: no sign"),
        (f"{GLOO}\nsrun: error: Node failure on n4", GLOO, "node", "a node failed: srun: error: Node failure on n4"),
        (GLOO, GLOO, "peer", "a rank lost another one, which had ended first"),
        ("step 1\nstep 2", "", "exit", "exit code 7"),
        ("", "", "exit", "exit code 7"),
        ("srun: error: n1: task 3: Exited with exit code 7", "", "exit", "task 3 ended with code 7"),
        # NCCL's watchdog ends its process, and srun or torchrun the others.
        (f"{WATCHDOG}\nsrun: error: n1: task 1: Aborted\nsrun: error: n1: tasks 0,2-3: Killed", "", "nccl", "a coll"),
        (
            "srun: error: n1: task 1: Exited with exit code 5\nsrun: error: n1: task 0: Killed",
            "",
            "exit",
            "task 1 ended",
        ),
        (
            f"E1130 failed (exitcode: 3) local_rank: 1 (pid: 7)\n{ROOT_CAUSE}",
            "",
            "exit",
            "local rank 1 ended with code 3",
        ),
        # Any class that ends a traceback is an exception; what was caught is not the cause.
        (f"{TRACEBACK}\nmymod.LossDiverged: at step 7", "", "exception", "mymod.LossDiverged: at step 7"),
        (f"{TRACEBACK}\nzlib.error: Error -3", "", "exception", "zlib.error: Error -3"),
        (f"0: [rank0]: {TRACEBACK}\n0: [rank0]: ValueError: no", "", "exception", "rank 0: ValueError: no"),
        (
            f"{TRACEBACK}\nKeyError: 'a'\n\nDuring handling of the above exception, another exception occurred:\n\n"
            f"{TRACEBACK}\ntorch.OutOfMemoryError: CUDA out of memory",
            "",
            "oom",
            "a GPU ran out of memory",
        ),
        (f"{TRACEBACK}\nImportError: no flash_attn\ngoing on\nRuntimeError: the end", "", "exception", "RuntimeError"),
        ("Fatal Python error: Segmentation fault\n\nThread 0x1:", "", "signal", "the program was killed by SIGSEGV"),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate", "", "host-oom", "the job ran out of host"),
        ("    raise MemoryError(\nValueError: real", "", "exception", "ValueError: real"),
        ("OSError: libcuda.so.1: cannot open shared object file", "", "ecc", "a GPU is faulty"),
        ("requests.exceptions.ConnectionError: HTTPSConnectionPool(host='x'): Max retries", "", "network", "a server"),
        ("EOFError: Ran out of input", "", "exception", "EOFError"),
        # A line that mentions an error is not what ended the attempt.
        (
            "[W socket.cpp:601] failed to connect to [n1]:29500 (errno: 111 - Connection refused)",
            "",
            "exit",
            "exit code",
        ),
        (
            "WARNING: OSError: [Errno 28] No space (error), continuing\nRuntimeError: real",
            "",
            "exception",
            "RuntimeErr",
        ),
        ("slurm_script: line 5: module: command not found\nRuntimeError: real", "", "exception", "RuntimeError: real"),
        ("UserWarning: Failed to load libpng16.so: cannot open shared object file", "", "exit", "exit code 7"),
        # What a log mentions is not what ended the attempt.
        ("using the memory saver, to avoid CUDA out of memory", "", "exit", "exit code 7"),
        ("OSError: a retry follows\n" + "step\n" * 400 + "KeyError: 'end'", "", "exception", "KeyError: 'end'"),
    ],
)
def test_the_first_cause(log, reported, name, line):
    found = cause_of_crash(reported, [[], log.splitlines()], "exit code 7")
    assert (found.name, found.line[: len(line)]) == (name, line)
    assert len(found.line) <= 300
    assert "\n" not in found.line


def test_a_secret_is_not_repeated():
    found = cause_of_crash("", [["ValueError: HF_TOKEN=abcdefghijklmnop1234 is refused"]], "exit code 1")
    assert "abcdefgh" not in found.line + "".join(found.evidence)


def test_the_errors_of_the_file_of_errors_count_first():
    output = ["step"] * 1000 + ["ConnectionError: wandb is away"]
    assert cause_of_crash("", [["ValueError: real"], output], "exit code 1").line == "ValueError: real"


def test_the_node_of_the_process_that_failed_first():
    log = ["[rank6]: RuntimeError: CUDA error: uncorrectable ECC error encountered"]
    log += ["srun: error: n1: tasks 0-3: Killed", "srun: error: n3: tasks 5-6: Exited with exit code 1"]
    assert cause_of_crash("", [log], "exit code 1").node == "n3"
    assert cause_of_crash("", [[log[0].removeprefix("[rank6]: "), *log[1:]]], "exit code 1").node == ""
    assert cause_of_crash("", [["srun: error: Node failure on n7", *log[1:]]], "exit code 1").node == "n7"


STEPD = "slurmstepd: error: *** JOB 334 ON n1 CANCELLED AT 2026-11-30T02:38:25{} ***"


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (STEPD.format(" DUE TO TIME LIMIT"), "time-limit"),
        (STEPD.format(" DUE TO PREEMPTION"), "preempted"),
        (STEPD.format(" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS"), "node"),
        (STEPD.format(" DUE TO JOB REQUEUE"), "requeued"),
        (STEPD.format(""), "cancelled"),
        (STEPD.format(" DUE TO TIME LIMIT").replace("JOB 334", "STEP 334.0"), "time-limit"),
        (STEPD.format(" DUE TO TIME LIMIT").replace("334", "333"), None),
        ("the job was CANCELLED DUE TO TIME LIMIT", None),
    ],
)
def test_the_log_says_why_slurm_ended_a_job(line, name):
    found = asked_by([[], ["step 1", line]], "334")
    assert (found and found.name) == name


def test_the_same_error_twice_holds_the_chain():
    first = cause_of_crash("ValueError: no data at 0x7f12 of [10.0.0.1]:4711", [], "exit code 1")
    again = cause_of_crash("ValueError: no data at 0x7f99 of [10.0.0.2]:4712", [], "exit code 1")
    other = cause_of_crash("ValueError: no labels", [], "exit code 1")

    def reaction(before, cause, has_saved=False, overrides=None):
        return with_reaction(cause, overrides or {}, before, has_saved, any_saved=True).reaction

    assert reaction(None, first) == "count"
    assert reaction(first, again) == "hold"
    assert reaction(first, other) == "count"
    assert reaction(first, again, has_saved=True) == "count"
    assert reaction(first, again, overrides={"repeat": "count"}) == "count"
    assert reaction(first, again, overrides={"exception": "again"}) == "again"
    for passing in ("FileNotFoundError: data", "TimeoutError: the store", "RuntimeError: CUDA error: launch failure"):
        cause = cause_of_crash(passing, [], "exit code 1")
        assert reaction(cause, cause) == "count"


def test_a_missing_module_holds_a_chain_that_never_worked():
    missing = cause_of_crash("ModuleNotFoundError: No module named 'x'", [], "exit code 1")
    assert with_reaction(missing, {}, None, False, any_saved=False).reaction == "hold"
    assert with_reaction(missing, {}, None, False, any_saved=True).reaction == "count"
    assert with_reaction(missing, {}, None, True, any_saved=False).reaction == "count"


def test_reactions_of_the_user():
    assert parse_reactions(["oom=again", " import = count "]) == {"oom": "again", "import": "count"}
    with pytest.raises(ConfigError, match="no cause 'omo'; known: oom, host-oom"):
        parse_reactions(["omo=again"])
    with pytest.raises(ConfigError, match="'sometimes' is not a reaction; choose one of again, elsewhere"):
        parse_reactions(["oom=sometimes"])


def test_every_rule_has_its_own_name_and_a_remedy():
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.remedy and rule.title for rule in RULES)
    assert set(CRASHES) < {rule.name for rule in RULES}
    assert Cause("no such rule", "x").remedy

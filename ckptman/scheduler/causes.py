"""Why an attempt ended, and the reaction of its chain: ordered rules over log lines, error messages and exit codes."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from ckptman.errors import ConfigError, masked
from ckptman.policies.resubmit import Reaction

_LONGEST, _MOST_EVIDENCE = 240, 6
_GAP_LINES = 300
"""Errors of one end are not further apart in a log."""


@dataclass(frozen=True)
class Rule:
    """One kind of cause. `rank`: of two kinds in one log, the lower one explains the higher one."""

    name: str
    title: str
    reaction: Reaction
    remedy: str
    pattern: str = r"(?!)"
    rank: int = 2


RULES = (
    Rule(
        *("node", "a node failed", "elsewhere", "nothing: the next attempt runs without that node"),
        r"srun: error: Node failure on|DUE TO NODE FAILURE|^NODE_FAIL\b|^BOOT_FAIL\b",
        rank=0,
    ),
    Rule(
        *("oom", "a GPU ran out of memory", "count", "use smaller batches, or shard the model over more GPUs"),
        r"OutOfMemoryError\b|(?:CUDA|HIP) out of memory|CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory|"
        r"CUDA error: out of memory",
    ),
    Rule(
        *(
            "host-oom",
            "the job ran out of host memory",
            "count",
            "use less memory per rank, or ask Slurm for more (--mem)",
        ),
        r"oom[_-]kill|Out Of Memory|Killed process \d+|^OUT_OF_MEMORY\b|\bMemoryError\b|std::bad_alloc|"
        r"DefaultCPUAllocator: (?:can't|not enough)|Cannot allocate memory",
        rank=0,
    ),
    Rule(
        *("ecc", "a GPU is faulty", "elsewhere", "report the node to the site"),
        r"uncorrectable (?:NVLink|ECC)|ECC error|NVRM: Xid|\bXid \(|GPU has fallen off the bus|"
        r"hipErrorECCNotCorrectable|CUDA error: (?:uncorrectable|hardware)",
    ),
    Rule(
        *("space", "no space or quota is left", "wait", "free space or quota"),
        r"No space left on device|Disk quota exceeded|\bENOSPC\b|\bEDQUOT\b|File too large",
    ),
    Rule(
        *("busy", "another run writes to the root", "wait", "stop the other run, or give this one a root of its own"),
        r"BusyError\b",
    ),
    Rule(
        *("port", "a port is taken", "again", "nothing: the next attempt uses another port or node"),
        r"Address already in use|\bEADDRINUSE\b",
    ),
    Rule(
        *("filesystem", "a file system is gone", "wait", "check that the file system is mounted on all nodes"),
        r"Stale file handle|Transport endpoint is (?:not connected|shut down)|\[Errno 5\]|Input/output error|"
        r"Cannot send after transport endpoint|RootError: .*(?:not on the file system|not mounted)",
    ),
    Rule(
        *("import", "a module or library is missing", "hold", "install it into the environment of the job"),
        r"ModuleNotFoundError\b|ImportError\b|cannot open shared object file|: command not found|"
        r"can't open file .*No such file|SyntaxError\b|IndentationError\b",
    ),
    Rule(
        *("gpu", "a GPU reported an error", "count", "run once with CUDA_LAUNCH_BLOCKING=1 to find the call"),
        r"(?:CUDA|HIP|CUBLAS|cuDNN|MIOpen) error\b|device-side assert|CUBLAS_STATUS_|CUDNN_STATUS_|hipError[A-Z]\w+|"
        r"AcceleratorError\b",
    ),
    Rule(
        *("nccl", "a collective timed out or failed", "again", "if it happens again, find the rank that is late"),
        r"[Ww]atchdog caught collective operation timeout|NCCL error|ncclSystemError|ncclInternalError|"
        r"ncclRemoteError|ncclUnhandledCudaError|DistBackendError\b",
        rank=3,
    ),
    Rule(
        *("hang", "a rank was silent", "count", "see its stack in the log of the attempt"),
        r"Stalled: |RankLostError\b",
    ),
    Rule("exception", "an exception", "count", "correct the program or its data"),
    Rule("signal", "a process was killed", "count", "see the log of the attempt"),
    Rule(
        *("peer", "a rank lost another one, which had ended first", "again", "find the first rank that ended"),
        r"Connection (?:closed by peer|reset by peer|refused)|gloo/transport|Broken pipe|DistNetworkError\b|"
        r"DistStoreError\b|ChildFailedError\b|SignalException\b|recvValue failed|socketPollConnect|EOFError\b",
        rank=8,
    ),
    Rule("exit", "an exit code alone", "count", "find the error in the log of the attempt", rank=7),
    Rule("repeat", "the same error twice in a row", "hold", "correct the program or its data"),
    Rule("time-limit", "the time limit", "again", "nothing"),
    Rule("preempted", "preempted by another job", "again", "nothing"),
    Rule("cancelled", "cancelled with scancel", "again", "cancel the chain if you meant all of it"),
    Rule("requeued", "the job was requeued", "again", "nothing"),
    Rule("asked", "asked to stop", "again", "nothing"),
    Rule("unknown", "the cause is unknown", "again", "see the log of the attempt"),
)
"""In the order in which a line is matched."""
_BY_NAME = {rule.name: rule for rule in RULES}
OVERRIDABLE = tuple(rule.name for rule in RULES[: [rule.name for rule in RULES].index("time-limit")])
"""The causes of a crash."""
_REPEATABLE = ("exception", "import", "oom", "gpu")
"""Causes that lie in the program, so that the same error twice in a row is no coincidence."""
_BY_SLURM = (
    (re.compile(r"CANCELLED AT \S+ DUE TO TIME LIMIT"), "time-limit"),
    (re.compile(r"CANCELLED AT \S+ DUE TO PREEMPTION"), "preempted"),
    (re.compile(r"CANCELLED AT \S+ DUE TO NODE FAILURE"), "node"),
    (re.compile(r"CANCELLED AT \S+ DUE TO JOB REQUEUE"), "requeued"),
    (re.compile(r"\bJOB \d+ ON \S+ CANCELLED AT \S+ \*\*\*"), "cancelled"),
)
_PATTERNS = [(re.compile(rule.pattern), rule) for rule in RULES]
_LABEL = re.compile(r"^(?:\[(?:rank|default)?(?P<a>\d+)\]:? ?|(?P<b>\d+): )")
"""How torch, torchrun and `srun --label` begin a line of one rank."""
_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Failure|Failed|Timeout|Expired|Exit|Stalled|StopIteration)(?::\s.*)?$"
)
_ENDED_BY_SIGNAL = re.compile(
    r"(?:srun: error: \S+ tasks? (?P<srun>[\d,-]+): (?P<word>Segmentation fault|Killed|Aborted|Bus error|"
    r"Floating point exception|Illegal instruction))|(?:exitcode: -(?P<agent>\d+)\) local_rank: (?P<local>\d+))|"
    r"(?:^\S+: line \d+: +\d+ (?P<bash>Segmentation fault|Killed|Aborted|Bus error))"
)
_WORDS = {
    "Segmentation fault": "SIGSEGV",
    "Killed": "SIGKILL",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
_EXIT_CODE = re.compile(r"srun: error: \S+ tasks? (?P<tasks>[\d,-]+): Exited with exit code (?P<code>\d+)")
_TOKENS = (
    *("error", "fatal", "fail", "fault", "kill", "abort", "illegal", "exception", "interrupt", "timeout", "expired"),
    *("exit", "stalled", "stopiteration", "watchdog", "not found", "can't open", "xid", "out_of_memory", "bad_alloc"),
)
"""A line without any of them is no error: most lines of a log."""
_SAYS_ERROR = re.compile(r"(?i)error|fatal|fail|watchdog|not found|can't open|\bXid\b")
_NODE = re.compile(r"srun: error: (?P<srun>[\w.-]+): tasks? (?!.*Terminated)|^\s*host +: (?P<agent>[\w.-]+)")
_ADDRESS = re.compile(r"0x[0-9a-f]+|\bpid:? \d+|\[[\d.:a-f]+\]:\d+|:\d{2,5}\b")


@dataclass(frozen=True)
class Cause:
    """Why an attempt ended.

    Attributes:
        name: of the rule.
        line: one sentence for people, such as "rank 1 was killed by SIGSEGV".
        evidence: the lines it was found in, cut to 240 characters.
        reaction: what the chain does.
        node: where the first process ended, if the log names it.
    """

    name: str
    line: str
    evidence: tuple[str, ...] = ()
    reaction: Reaction = "count"
    node: str = ""

    @property
    def rule(self) -> Rule:
        return _BY_NAME.get(self.name, _BY_NAME["unknown"])

    @property
    def remedy(self) -> str:
        return self.rule.remedy


@dataclass(frozen=True)
class _Found:
    at: int
    rule: Rule
    line: str
    text: str


def cause_of_crash(reason: str, lines: Sequence[str], code: str) -> Cause:
    """Return the first cause of a crash.

    Args:
        reason: the error that the run itself reported; "" if it reported none.
        lines: the end of the log of the attempt. The first error of the last burst is the cause, unless it is the
            mere loss of another rank.
        code: how the batch script ended, in words.
    """
    found = list(_last_burst([each for at, line in enumerate(lines) if (each := _error_in(at, line)) is not None]))
    reported = _error_in(-1, " ".join(reason.split())) if reason else None
    if reason and reported is None:
        reported = _Found(-1, _BY_NAME["exception"], _short(reason), _short(reason))
    if reported is not None and not any(_same(reported.text, each.text) for each in found):
        # The leader reports its own error, which may be an echo: a log tells the order.
        later = reported.rule.rank > 2 and bool(found)
        found.append(replace(reported, at=len(lines) if later else -1))
    if not found:
        return Cause("exit", code)
    first = min(found, key=lambda each: (each.rule.rank, each.at))
    evidence = tuple(dict.fromkeys(each.text for each in sorted(found, key=lambda each: (each is not first, each.at))))
    line = first.line if first.rule.rank < 7 or first.rule.name == "exit" else first.rule.title
    begin = min((each.at for each in found if each.at >= 0), default=0)
    node = next((match["srun"] or match["agent"] for each in lines[begin:] if (match := _NODE.search(each))), "")
    return Cause(first.rule.name, line, evidence[:_MOST_EVIDENCE], first.rule.reaction, node)


def asked_by(lines: Iterable[str], job_id: str) -> Cause | None:
    """Return why Slurm ended a job, as its log says; None if it does not. Other jobs may write to the same log."""
    of_job = re.compile(rf"\b(?:JOB|STEP) {re.escape(job_id)}(?:\.\w+)? ON ")
    for line in lines:
        if "CANCELLED AT" not in line or not of_job.search(line):
            continue
        for pattern, name in _BY_SLURM:
            if pattern.search(line):
                return Cause(name, _BY_NAME[name].title, (_short(line),), _BY_NAME[name].reaction)
    return None


def with_reaction(
    cause: Cause, overrides: Mapping[str, Reaction], before: Cause | None, has_saved: bool, any_saved: bool
) -> Cause:
    """Return a cause with what the chain does about it.

    Args:
        overrides: reactions that the user chose, by name.
        before: the cause of the attempt before, if it crashed.
        has_saved: whether this attempt left a new checkpoint, or is taken to have.
        any_saved: whether any attempt of the chain did. A missing module is then the fault of a node, not of the run.
    """
    reaction = cause.reaction
    if cause.name == "import" and any_saved:
        reaction = "count"
    if cause.name in _REPEATABLE and not has_saved and before is not None and _is_repeated(before, cause):
        reaction = overrides.get("repeat", "hold")
    return replace(cause, reaction=overrides.get(cause.name, reaction))


def _is_repeated(before: Cause, cause: Cause) -> bool:
    first, second = (each.evidence[0] if each.evidence else "" for each in (before, cause))
    return before.name == cause.name and _same(first, second)


def parse_reactions(given: Sequence[str]) -> dict[str, Reaction]:
    """Read `NAME=REACTION`, as in "oom=again".

    Raises: ConfigError (an unknown name or reaction; the known ones are listed).
    """
    found: dict[str, Reaction] = {}
    for each in given:
        name, _, reaction = map(str.strip, each.partition("="))
        if name not in OVERRIDABLE:
            raise ConfigError(f"--on {each}: there is no cause {name!r}; known: {', '.join(OVERRIDABLE)}")
        if reaction not in get_args(Reaction):
            raise ConfigError(
                f"--on {each}: {reaction!r} is not a reaction; choose one of {', '.join(get_args(Reaction))}"
            )
        found[name] = reaction  # type: ignore[assignment]
    return found


def _last_burst(found: Sequence[_Found]) -> Iterable[_Found]:
    """Return the errors at the end: what was logged long before, and survived, is not the cause."""
    start = len(found)
    while start > 0 and (start == len(found) or found[start].at - found[start - 1].at <= _GAP_LINES):
        start -= 1
    return found[start:]


def _error_in(at: int, line: str) -> _Found | None:
    lower = line.lower()
    if at >= 0 and not any(token in lower for token in _TOKENS):
        return None
    label = _LABEL.match(line)
    rank = (label["a"] or label["b"]) if label else None
    text = line[label.end() :] if label else line
    if text[:1].isspace() and label is None:
        text = text.strip()  # of a traceback or a table of torchrun
    whose = f"rank {rank}: " if rank is not None else ""
    if killed := _ENDED_BY_SIGNAL.search(text):
        return _Found(at, _BY_NAME["signal"], _killed(killed), _short(text))
    if exited := _EXIT_CODE.search(text):
        return _Found(at, _BY_NAME["exit"], f"task {exited['tasks']} ended with code {exited['code']}", _short(text))
    is_error = bool(_EXCEPTION.match(text))
    for pattern, rule in _PATTERNS:
        if pattern.search(text):
            if at >= 0 and rule.rank > 0 and not is_error and not _SAYS_ERROR.search(text):
                return None  # a line that mentions it
            whose = whose.replace("rank", "reported by rank") if rule.name == "nccl" else whose
            return _Found(at, rule, f"{rule.title}: {whose}{_short(text)}", _short(text))
    if is_error and not text.startswith(("KeyboardInterrupt", "SystemExit")):
        return _Found(at, _BY_NAME["exception"], f"{whose}{_short(text)}", _short(text))
    return None


def _killed(match: re.Match[str]) -> str:
    if match["agent"]:
        try:
            name = signal.Signals(int(match["agent"])).name
        except ValueError:
            name = f"signal {match['agent']}"
        return f"local rank {match['local']} was killed by {name}"
    if match["srun"]:
        tasks = match["srun"]
        return (
            f"{'rank' if tasks.isdigit() else 'ranks'} {tasks} {'was' if tasks.isdigit() else 'were'} killed by "
            + (_WORDS[match["word"]])
        )
    return f"the program was killed by {_WORDS[match['bash']]}"


def _same(one: str, other: str) -> bool:
    """Return whether two errors are equal, apart from addresses, ports and process ids."""
    a, b = (_ADDRESS.sub("", each).strip() for each in (one, other))
    return bool(a) and (a == b or a.endswith(b) or b.endswith(a))


def _short(text: str) -> str:
    text = masked(" ".join(text.split()))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."

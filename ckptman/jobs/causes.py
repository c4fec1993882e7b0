"""Why an attempt ended, and the reaction of its chain: ordered rules over log lines, error messages and exit codes."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import get_args

from ckptman.errors import ConfigError, masked
from ckptman.policies.resubmit import Reaction

_LONGEST, _MOST_EVIDENCE = 240, 6
_MOST_LINES = 20_000
_GAP_LINES = 300
"""So many lines of a log are read; errors of one end are not further apart."""


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
        r"(?:CUDA|HIP) error: out of memory|RESOURCE_EXHAUSTED: Out of memory",
    ),
    Rule(
        *("host-oom", "the job ran out of host memory", "count"),
        "use less memory per rank, or ask Slurm for more (--mem)",
        r"oom[_-]kill|Out Of Memory|Killed process \d+|^OUT_OF_MEMORY\b|MemoryError\b|std::bad_alloc|"
        r"DefaultCPUAllocator: (?:can't|not enough)|Cannot allocate memory",
        rank=0,
    ),
    Rule(
        *("ecc", "a GPU is faulty", "elsewhere", "report the node to the site"),
        r"uncorrectable (?:NVLink|ECC)|ECC error|NVRM: Xid|\bXid \(|GPU has fallen off the bus|"
        r"hipErrorECCNotCorrectable|CUDA error: (?:uncorrectable|hardware)|"
        r"lib(?:cuda|nvidia-ml|amdhip64|hsa-runtime64)\.so[.\d]*: cannot open",
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
        *("network", "a server could not be reached", "count"),
        "download what the program needs beforehand: compute nodes often have no internet",
        r"HTTPS?ConnectionPool|HTTPError\b|MaxRetryError|Name or service not known|name resolution|ProxyError|"
        r"Network is unreachable|LocalEntryNotFoundError|OfflineModeIsEnabled|Connect(?:ion)?Timeout|ReadTimeout\b",
    ),
    Rule(
        *("import", "a module or library is missing", "hold", "install it into the environment of the job"),
        r"ModuleNotFoundError\b|ImportError\b|^OSError: .*cannot open shared object file|"
        r"^\S*python[\d.]*: can't open file .*No such file|^SyntaxError\b|^IndentationError\b",
    ),
    Rule(
        *("gpu", "a GPU reported an error", "count", "run once with CUDA_LAUNCH_BLOCKING=1 to find the call"),
        r"(?:CUDA|HIP|CUBLAS|cuDNN|MIOpen) error\b|device-side assert|CUBLAS_STATUS_|CUDNN_STATUS_|hipError[A-Z]\w+|"
        r"AcceleratorError\b",
    ),
    Rule(
        *("nccl", "a collective timed out or failed", "again", "if it happens again, find the rank that is late"),
        r"[Ww]atchdog caught collective operation timeout|NCCL error|ncclSystemError|ncclInternalError|"
        r"ncclRemoteError|ncclUnhandledCudaError|DistBackendError\b|NCCL communicator was aborted",
        rank=3,
    ),
    Rule("hang", "a rank was silent", "count", "see its stack in the log of the attempt", r"Stalled: |RankLostError\b"),
    Rule(
        *("peer", "a rank lost another one, which had ended first", "again", "find the first rank that ended"),
        r"Connection (?:closed|reset) by peer|gloo/transport|DistNetworkError\b|DistStoreError\b|recvValue failed|"
        r"socketPollConnect|Rendezvous\w*Error\b|client socket has timed out|TCPStore\b",
        rank=8,
    ),
    Rule("exception", "an exception", "count", "correct the program or its data"),
    Rule("signal", "a process was killed", "count", "see the log of the attempt"),
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
CRASHES = tuple(rule.name for rule in RULES[1 : [rule.name for rule in RULES].index("time-limit")])
"""The causes of a crash. A node that fails is none."""
_REPEATABLE = ("exception", "import", "oom")
"""Causes that lie in the program, so that the same error twice in a row is no coincidence."""
_PASSES = re.compile(r"OSError|FileNotFound|Permission|Connection|time(?:d )?out|Timeout|DataLoader worker|Temporar")
"""Words of an exception that a file system or a network can be to blame for."""
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
    r"^(?:[A-Za-z_]\w*\.)*_?[A-Z]\w*(?:Error|Exception|Interrupt|Failure|Failed|Timeout|Expired|Stalled|StopIteration)"
    r"(?::\s.*|:)?$"
)
_ANY_EXCEPTION = re.compile(r"^(?!KeyboardInterrupt|SystemExit)[A-Za-z_][\w.]*(?::\s.*|:)?$")
"""The first line after a traceback that is not indented."""
_ECHOES = re.compile(r"ChildFailedError\b|SignalException\b|CalledProcessError\b|^KeyboardInterrupt|^SystemExit")
"""Launchers report the end of their children so."""
_ENDED_BY_SIGNAL = re.compile(
    r"(?:srun: error: \S+ tasks? (?P<srun>[\d,-]+): (?P<word>Segmentation fault|Killed|Aborted|Bus error|"
    r"Floating point exception|Illegal instruction))|(?:exitcode: -(?P<agent>\d+)\) local_rank: (?P<local>\d+))|"
    r"(?:^\s*exitcode\s+: -(?P<table>\d+) \(pid)|"
    r"(?:^(?:\S+: line \d+: +\d+|Fatal Python error:) (?P<bash>Segmentation fault|Killed|Aborted|Bus error))"
)
_WORDS = {
    "Segmentation fault": "SIGSEGV",
    "Killed": "SIGKILL",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
_EXIT_CODE = re.compile(
    r"srun: error: \S+ tasks? (?P<tasks>[\d,-]+): Exited with exit code (?P<code>\d+)|"
    r"failed \(exitcode: (?P<agent>\d+)\) local_rank: (?P<local>\d+)"
)
_TOKENS = (
    *("error", "fatal", "fail", "fault", "kill", "abort", "illegal", "exception", "interrupt", "timeout", "expired"),
    *("exit", "stalled", "stopiteration", "watchdog", "can't open", "xid", "out_of_memory", "bad_alloc", "exhausted"),
)
"""A line without any of them is no error: most lines of a log."""
_SAYS_ERROR = re.compile(r"(?i)error|fatal|fail|watchdog|can't open|\bXid\b")
_SYSTEM = re.compile(
    r"^(?:slurmstepd|srun): |kernel:|^\[[\s\d.]+\] |^(?:OUT_OF_MEMORY|NODE_FAIL|BOOT_FAIL)\b|Watchdog "
)
"""How Slurm, the kernel and NCCL's watchdog begin a line."""
_ON_NODE = re.compile(r"srun: error: (?P<node>[\w.-]+): tasks? (?P<tasks>[\d,-]+): ")
_FAILED_NODE = re.compile(r"Node failure on ([\w.-]+)")
_ADDRESS = re.compile(r"0x[0-9a-f]+|\bpid:? \d+|\[[\d.:a-f]+\]:\d+|:\d{2,5}\b")


@dataclass(frozen=True)
class Cause:
    """Why an attempt ended.

    Attributes:
        name: of the rule.
        line: one sentence for people, such as "rank 1 was killed by SIGSEGV".
        evidence: the lines it was found in, cut to 240 characters.
        reaction: what the chain does.
        node: the node of the process that failed first, if the log names it.
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
    """An error in a log. `rank`: see `Rule`; `whose`: the rank of the process that wrote it, "" if it is unknown."""

    at: int
    rule: Rule
    line: str
    text: str
    rank: int
    whose: str = ""


def cause_of_crash(reason: str, logs: Sequence[Sequence[str]], code: str) -> Cause:
    """Return the first cause of a crash.

    Args:
        reason: the error that the run itself reported; "" if it reported none.
        logs: the ends of the logs of the attempt, the one of its errors first. The first error of the last burst is
            the cause, unless it is the mere loss of another rank.
        code: how the batch script ended, in words.
    """
    lines, found = next(((log, errors) for log in logs if (errors := _last_burst(_errors_in(log)))), ([], []))
    reported = _error_in(-1, " ".join(reason.split()), is_exception=True) if reason else None
    if reported is not None and not any(_same(reported.text, each.text) for each in found):
        # The leader reports its own error, which may be an echo: a log tells the order.
        later = reported.rank > 2 and bool(found)
        found = [*found, replace(reported, at=len(lines) if later else -1)]
    if not found:
        return Cause("exit", code)
    first = min(found, key=lambda each: (each.rank, each.at))
    evidence = tuple(dict.fromkeys(each.text for each in sorted(found, key=lambda each: (each is not first, each.at))))
    line = first.rule.title if first.rule.name == "peer" else first.line
    return Cause(
        first.rule.name, line, evidence[:_MOST_EVIDENCE], first.rule.reaction, _node_of(first, lines[-_MOST_LINES:])
    )


def _node_of(first: _Found, lines: Sequence[str]) -> str:
    """Return the node of an error, if the log names it."""
    for line in lines:
        if (failed := _FAILED_NODE.search(line)) is not None:
            return failed[1]
        told = _ON_NODE.search(line) if first.whose else None
        if told is not None and int(first.whose) in _numbers(told["tasks"]):
            return told["node"]
    return ""


def _numbers(tasks: str) -> set[int]:
    """Return the numbers that "0,2-3" stands for."""
    found: set[int] = set()
    for part in tasks.split(","):
        low, _, high = part.partition("-")
        if low.isdigit() and (high or low).isdigit():
            found.update(range(int(low), min(int(high or low), int(low) + 100_000) + 1))
    return found


def asked_by(logs: Iterable[Iterable[str]], job_id: str) -> Cause | None:
    """Return why Slurm ended a job, as its log says; None if it does not. Other jobs may write to the same log."""
    of_job = re.compile(rf"\b(?:JOB|STEP) {re.escape(job_id)}(?:\.\w+)? ON ")
    for line in chain.from_iterable(logs):
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
    if cause.name == "import" and (has_saved or any_saved):
        reaction = "count"
    if not has_saved and before is not None and _is_repeated(before, cause):
        reaction = overrides.get("repeat", "hold")
    return replace(cause, reaction=overrides.get(cause.name, reaction))


def _is_repeated(before: Cause, cause: Cause) -> bool:
    first, second = (each.evidence[0] if each.evidence else "" for each in (before, cause))
    is_of_program = cause.name in _REPEATABLE and not _PASSES.search(second)
    return is_of_program and before.name == cause.name and _same(first, second)


def parse_reactions(given: Sequence[str]) -> dict[str, Reaction]:
    """Read `NAME=REACTION`, as in "oom=again".

    Raises: ConfigError (an unknown name or reaction; the known ones are listed).
    """
    found: dict[str, Reaction] = {}
    for each in given:
        name, _, reaction = map(str.strip, each.partition("="))
        if name not in CRASHES:
            raise ConfigError(f"--on {each}: there is no cause {name!r}; known: {', '.join(CRASHES)}")
        if reaction not in get_args(Reaction):
            raise ConfigError(
                f"--on {each}: {reaction!r} is not a reaction; choose one of {', '.join(get_args(Reaction))}"
            )
        found[name] = reaction  # type: ignore[assignment]
    return found


def _errors_in(log: Sequence[str]) -> list[_Found]:
    """Return the errors in the last lines of a log, in their order."""
    found: list[_Found] = []
    tracebacks: set[str] = set()
    start = max(0, len(log) - _MOST_LINES)
    for at, line in enumerate(log[start:], start):
        label, text = _unlabelled(line)
        if text.startswith("Traceback (most recent call last)"):
            tracebacks.add(label)
        elif "During handling of the above exception" in text:  # that one was caught
            caught = next((each for each in reversed(found) if each.whose == label), None)
            found = [each for each in found if each is not caught]
        elif label in tracebacks and text and not text[0].isspace():
            tracebacks.discard(label)
            if (error := _error_in(at, line, is_exception=bool(_ANY_EXCEPTION.match(text)))) is not None:
                found.append(error)
        elif (error := _error_in(at, line)) is not None:
            found.append(error)
    return _without_consequences(found)


def _without_consequences(found: Sequence[_Found]) -> list[_Found]:
    """Rank those errors lower that an earlier or a later one explains."""
    first_end = min((each.at for each in found if each.rule.name in ("exit", "signal")), default=0)
    last_other = max((each.at for each in found if each.rule.name != "import" and each.rank <= 3), default=-1)
    ranked = []
    for each in found:
        rank = each.rank
        if each.rule.name == "import" and each.at < last_other:
            rank = 6  # the program went on without that module
        elif each.rule.name == "signal" and "SIGKILL" in each.line and first_end < each.at:
            rank = 8  # srun ends the other tasks
        elif each.rule.name == "signal" and "SIGABRT" in each.line:
            rank = 4  # NCCL's watchdog ends its process so
        ranked.append(replace(each, rank=rank))
    return ranked


def _last_burst(found: Sequence[_Found]) -> list[_Found]:
    """Return the errors at the end: what was logged long before, and survived, is not the cause."""
    start = len(found)
    while start > 0 and (start == len(found) or found[start].at - found[start - 1].at <= _GAP_LINES):
        start -= 1
    return list(found[start:])


def _unlabelled(line: str) -> tuple[str, str]:
    """Return the rank that a line is labelled with, "" if it is not, and the rest of it."""
    whose = ""
    while (label := _LABEL.match(line)) is not None:
        whose, line = label["a"] or label["b"], line[label.end() :]
    return whose, line


def _error_in(at: int, line: str, *, is_exception: bool = False) -> _Found | None:
    """Return the error in a line. `is_exception`: it is known to be the end of a traceback, or the report of a run."""
    lower = line.lower()
    if not is_exception and not any(token in lower for token in _TOKENS):
        return None
    whose, text = _unlabelled(line)
    short = _short(text)
    if killed := _ENDED_BY_SIGNAL.search(text):
        return _Found(at, _BY_NAME["signal"], _killed(killed), short, 2)
    if exited := _EXIT_CODE.search(text):
        task = f"local rank {exited['local']}" if exited["local"] else f"task {exited['tasks']}"
        return _Found(at, _BY_NAME["exit"], f"{task} ended with code {exited['code'] or exited['agent']}", short, 7)
    if text[:1].isspace() or _ECHOES.search(text):
        return None  # a line of source in a traceback, or the word of a launcher
    is_exception = is_exception or bool(_EXCEPTION.match(text))
    is_system = bool(_SYSTEM.search(text))
    of_rank = f"rank {whose}: " if whose else ""
    for pattern, rule in _PATTERNS:
        if pattern.search(text):
            is_sure = is_exception or is_system or "can't open file" in text
            if not is_sure and (rule.name in ("peer", "import") or not _SAYS_ERROR.search(text)):
                return None  # a line that mentions it
            rank = rule.rank if is_system else max(rule.rank, 2 if is_exception or is_sure else 5)
            of_rank = of_rank.replace("rank", "reported by rank") if rule.name == "nccl" else of_rank
            title = "" if rule.name == "hang" else f"{rule.title}: "
            return _Found(at, rule, f"{title}{of_rank}{short}", short, rank, whose)
    if is_exception:
        return _Found(at, _BY_NAME["exception"], f"{of_rank}{short}", short, 2, whose)
    return None


def _killed(match: re.Match[str]) -> str:
    if number := match["agent"] or match["table"]:
        try:
            name = signal.Signals(int(number)).name
        except ValueError:
            name = f"signal {number}"
        return f"{'local rank ' + match['local'] if match['local'] else 'a rank'} was killed by {name}"
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

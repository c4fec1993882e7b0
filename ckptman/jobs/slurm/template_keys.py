"""The keys of the Slurm templates: which there are, what they are unless said otherwise, and what is refused.

One model for each kind of job; a template that is for one cluster has a model with the defaults of that cluster.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import pydantic
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from ckptman.errors import ConfigError, UnknownKeyError
from ckptman.jobs.slurm.batch_script import limit_seconds

# What no text in a batch script may hold: sbatch reads lines, and a terminal obeys control characters.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_LINE_BREAK = re.compile("[\t\n]")
_TRAIN = "python -m ckptman.train --config run.toml"
VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})|(?<![^,:=])~(?=/|$)", re.ASCII)
"""A variable as a user writes it in a path, or a leading `~`."""
_OF_ENVIRONMENT = re.compile(r"\$(?:[A-Z_][A-Z0-9_]*\b|\{[A-Z_][A-Z0-9_]*\})|^~(?=/|$)", re.ASCII)
"""Not `${run.name}` of a configuration library."""
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
EXPANDED = ("venv", "env", "container", "container_command", "container_binds")
"""The keys in which the job expands variables; elsewhere they are refused, and `setup` is shell anyway."""
_POINT = (
    "bash -c 'exec python -m ckptman.train --config run.toml --set run.steps=50 "
    '--set checkpoint.root="runs/scaling/$SCALING_POINT" --set run.log="runs/scaling/$SCALING_POINT.jsonl"\''
)
_DAY_SECONDS = 86400
_LUMI_BINDS = (
    "/var/spool/slurmd,/opt/cray,/usr/lib64/libcxi.so.1,/pfs,/scratch,/projappl,/project,/flash,/appl"  # the network's
)
_LUMI_MASKS = (
    "0x00fe000000000000,0xfe00000000000000,0x0000000000fe0000,0x00000000fe000000,"
    "0x00000000000000fe,0x000000000000fe00,0x000000fe00000000,0x0000fe0000000000"
)


WHAT = {
    "command": "what is run: words, each quoted, so that nothing in them is expanded",
    "job_name": "the name in the queue and of the log",
    "account": "the project that pays",
    "partition": "where it runs",
    "qos": "quality of service",
    "time": "time limit: minutes (90), hours (04:00:00), days (1-12:00:00)",
    "cpus_per_task": "cores of one rank",
    "mem": "memory of a node, such as 480G",
    "log_folder": "where the log goes; it has to be there",
    "modules": "modules to load, with blanks between them",
    "venv": "a virtual environment to activate, inside the container if there is one",
    "setup": "a line of shell, as it is; each further one is added",
    "env": "environment variables: env.NAME=VALUE",
    "sbatch": "an option of sbatch, such as --constraint=a; each further one is added",
    "nodes": "nodes",
    "gpus_per_node": "GPUs of a node; 0: none",
    "gpu_type": "where a cluster has several, such as h100",
    "tasks_per_node": "ranks of a node; left out: one per GPU, or one",
    "exclusive": "true: no other job on these nodes",
    "master_suffix": "added to the name of the first node in MASTER_ADDR, such as i at JSC",
    "interface": "the network interface of the ranks, such as ib0, where a node has several",
    "warning_seconds": "the warning comes that long before the time limit",
    "container": "the image of a container that the command runs in",
    "container_command": "what runs the container",
    "container_binds": "folders of the host to be seen in there, with commas between them",
    "cpu_masks": "the cores of each rank of a node; empty: as Slurm does it",
    "dmon_seconds": "a line for each GPU in the log of the GPUs that often",
    "restarts": "so often torchrun starts the ranks anew within the job",
    "spare_nodes": "so many nodes more, which wait to replace one that dies",
    "matrix": "the points: nodes x ranks of a node, with blanks between them",
}
"""What each key means, for people."""


def _words(value: str) -> str:
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise ValueError(f"{str(error).lower()}: close the quotes as in a shell") from None
    if not words:
        raise ValueError(f"nothing to run: give a command, such as {_TRAIN}")
    return value


def _without_variables(value: str) -> str:
    """Refuse variables of the environment in a command, except in the script of a shell (`bash -c`)."""
    words = shlex.split(value)
    for place, word in enumerate(words):
        shells = [each for each in words[: place - 1] if each.rpartition("/")[2] in _SHELLS] if place > 1 else []
        is_script = bool(shells) and re.fullmatch(r"-[a-z]*c", words[place - 1]) is not None
        if not is_script and (found := _OF_ENVIRONMENT.search(word)):
            raise ValueError(
                f"{found[0]} would not be expanded: write the value itself, or run a shell, such as "
                f'bash -c "exec python train.py --out $SCRATCH/run"'
            )
    return value


def _time(value: str) -> str:
    if limit_seconds({"--time": value}) is None:
        raise ValueError(
            "not a time limit of at least 1 minute: give minutes (90), hours (04:00:00) or days and hours (1-12:00:00)"
        )
    return value


def _name_of_log(value: str) -> str:
    if "%" in value or "\\" in value:
        raise ValueError("% and \\ mean something else to Slurm in the name of a log: use a name without them")
    return value


def _name_of_job(value: str) -> str:
    if "/" in value:
        raise ValueError("the log is named after it, and / would be a folder: use a name without it")
    return _name_of_log(value)


def _variables(value: Mapping[str, str]) -> Mapping[str, str]:
    for name in value:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{name!r} is not the name of an environment variable: use letters, digits and _")
    return value


def _options(value: tuple[str, ...]) -> tuple[str, ...]:
    for option in value:
        if not re.fullmatch(r"(?s)--[a-z][a-z0-9-]*(=.+)?", option):
            raise ValueError(f"{option!r} is not an option: write it as --name=value")
    return value


def _points(value: str) -> str:
    if not value.split() or not all(re.fullmatch(r"[1-9]\d{0,5}x[1-9]\d{0,3}", each) for each in value.split()):
        raise ValueError("write points as nodes x ranks of a node, such as 1x1 1x8 2x8")
    return " ".join(value.split())


Count = Annotated[int, Field(gt=0)]
Command = Annotated[str, AfterValidator(_words), AfterValidator(_without_variables)]
Prefix = Annotated[str, AfterValidator(_words)]
Interface = Annotated[str, Field(pattern=r"^[\w.-]*(,[\w.-]+)*$")]
Suffix = Annotated[str, Field(pattern=r"^[\w.-]*$")]
JobName = Annotated[str, Field(min_length=1), AfterValidator(_name_of_job)]
Time = Annotated[str, AfterValidator(_time)]
Memory = Annotated[str, Field(pattern=r"^(\d+[KMGT]?)?$")]


class JobKeys(BaseModel):
    """What every job has: the keys of a CPU job. What is empty is left out of the script."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    command: Command = ""
    job_name: JobName = "ckptman"
    account: str = ""
    partition: str = ""
    qos: str = ""
    time: Time = "01:00:00"
    cpus_per_task: Count = 1
    mem: Memory = ""
    log_folder: Annotated[str, Field(min_length=1), AfterValidator(_name_of_log)] = "."
    modules: str = ""
    venv: str = ""
    setup: tuple[str, ...] = ()
    env: Annotated[Mapping[str, str], AfterValidator(_variables)] = {}
    sbatch: Annotated[tuple[str, ...], AfterValidator(_options)] = ()

    @field_validator("*")
    @classmethod
    def _can_be_written(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        texts = [value] if isinstance(value, str) else value
        if isinstance(texts, Mapping):
            texts = list(texts.values())
        for text in texts if isinstance(texts, (list, tuple)) else ():
            if found := _CONTROL.search(text):
                raise ValueError(f"a control character ({found[0]!r}) cannot be in a batch script: leave it out")
            if info.field_name not in ("command", "setup", "env") and (found := _LINE_BREAK.search(text)):
                raise ValueError(f"{found[0]!r} would end the #SBATCH line: give it on one line, without tabs")
            if info.field_name not in ("command", "setup", *EXPANDED) and (found := VARIABLE.search(text)):
                raise ValueError(f"{found[0]} would not be expanded here: write the value itself")
        return value


class TrainingKeys(JobKeys):
    """A job of several ranks on GPUs."""

    command: Command = _TRAIN
    job_name: JobName = "train"
    time: Time = "24:00:00"
    cpus_per_task: Count = 8
    nodes: Annotated[int, Field(ge=1)] = 1
    gpus_per_node: Annotated[int, Field(ge=0)] = 4
    gpu_type: Annotated[str, Field(pattern=r"^[\w.-]*$")] = ""
    tasks_per_node: Count | None = None
    exclusive: bool = False
    master_suffix: Suffix = ""
    interface: Interface = ""
    warning_seconds: Annotated[int, Field(gt=0, le=65535)] = 180
    container: str = ""
    container_command: Prefix = "singularity exec --nv"
    container_binds: str = ""

    @property
    def tasks(self) -> int:
        """Ranks of a node."""
        return self.tasks_per_node or self.gpus_per_node or 1


class TorchrunKeys(TrainingKeys):
    """torchrun starts the ranks of each node, and can start them anew."""

    restarts: Annotated[int, Field(ge=0)] = 0
    spare_nodes: Annotated[int, Field(ge=0)] = 0


class LeonardoKeys(TrainingKeys):
    """Leonardo Booster: whole nodes of 4 x A100, 32 cores and 494,000 MB."""

    partition: str = "boost_usr_prod"
    mem: Memory = "494000"
    exclusive: bool = True

    @property
    def needed_qos(self) -> str:
        """The QOS that a job of this size needs, as Leonardo's rules are; "" for the one that needs no name."""
        if self.partition != "boost_usr_prod":
            return ""
        if (limit_seconds({"--time": self.time}) or 0) > _DAY_SECONDS:
            return "boost_qos_lprod"
        return "boost_qos_bprod" if self.nodes > 64 else ""


class JscKeys(TorchrunKeys):
    """JUWELS Booster: whole nodes of 4 x A100 and 48 cores. JURECA and JUSUF differ in partition, cores and GPUs."""

    partition: str = "booster"
    cpus_per_task: Count = 12
    master_suffix: Suffix = "i"
    interface: Interface = "ib0"


class JupiterKeys(TorchrunKeys):
    """JUPITER Booster: whole nodes of 4 x GH200 and 288 cores."""

    partition: str = "booster"
    cpus_per_task: Count = 72


class LumiKeys(TrainingKeys):
    """LUMI-G: whole nodes of 8 GCDs, 7 cores for each, in a container."""

    partition: str = "standard-g"
    mem: Memory = "480G"
    cpus_per_task: Count = 7
    gpus_per_node: Annotated[int, Field(ge=0)] = 8
    exclusive: bool = True
    container: str = "pytorch.sif"
    container_command: Prefix = "singularity exec"
    container_binds: str = _LUMI_BINDS
    cpu_masks: Annotated[str, Field(pattern=r"^((0x)?[0-9a-fA-F]+(,(0x)?[0-9a-fA-F]+)*)?$")] = _LUMI_MASKS


class SuperpodKeys(TrainingKeys):
    """A DGX SuperPOD: whole nodes of 8 GPUs and 112 cores."""

    cpus_per_task: Count = 14
    gpus_per_node: Annotated[int, Field(ge=0)] = 8
    exclusive: bool = True
    dmon_seconds: Count = 10


class MatrixKeys(TrainingKeys):
    """An array of short runs. 0 nodes and -1 GPUs: as many as the largest point needs."""

    command: Command = _POINT
    job_name: JobName = "scaling"
    time: Time = "00:30:00"
    matrix: Annotated[str, AfterValidator(_points)] = "1x1 1x2 1x4 1x8 2x8"
    nodes: Annotated[int, Field(ge=0)] = 0
    gpus_per_node: Annotated[int, Field(ge=-1)] = -1


class TokenizeKeys(JobKeys):
    """One process that starts as many as it has cores."""

    command: Command = "python -m ckptman.train.tokenize tokens text --vocab-size 16384"
    job_name: JobName = "tokenize"
    time: Time = "04:00:00"
    cpus_per_task: Count = 16


class VerifyKeys(JobKeys):
    """Reads checkpoints."""

    command: Command = "ckptman verify runs/checkpoints --all"
    job_name: JobName = "verify"
    cpus_per_task: Count = 8


class PruneKeys(JobKeys):
    """Deletes checkpoints; as it is, it only says which."""

    command: Command = "ckptman prune runs/checkpoints --keep-last 3 --dry-run"
    job_name: JobName = "prune"


def check_keys(kind: type[JobKeys], values: Mapping[str, Any], where: str) -> JobKeys:
    """Checked keys from what a user gave.

    Raises: UnknownKeyError; ConfigError with one line per wrong value, or for restarts where there are none.
    """
    for key in values:
        if key not in kind.model_fields:
            if key in TorchrunKeys.model_fields and issubclass(kind, TrainingKeys):
                raise ConfigError(
                    f"{key}: in {where} srun starts the ranks, which never starts them anew, so a chain takes its next "
                    f"job after a crash; ckptman template torchrun restarts ranks within the job"
                )
            raise UnknownKeyError(key, list(kind.model_fields), where)
    try:
        keys = kind.model_validate(values)
        problems = list(_misfits(keys))
    except pydantic.ValidationError as error:
        problems = [_problem(each) for each in error.errors()]
    if problems:
        raise ConfigError("\n  ".join(["wrong values:", *problems] if len(problems) > 1 else problems))
    return keys


def points(keys: MatrixKeys) -> list[tuple[int, int]]:
    """(nodes, ranks of a node) of each point."""
    return [(int(nodes), int(tasks)) for nodes, tasks in (each.split("x") for each in keys.matrix.split())]


def _misfits(keys: JobKeys) -> Sequence[str]:
    """Return what is wrong between values that are each right."""
    if not isinstance(keys, TrainingKeys):
        return []
    problems = []
    limit = limit_seconds({"--time": keys.time}) or 0
    if keys.warning_seconds >= limit:
        problems.append(
            f"warning_seconds: {keys.warning_seconds} s is no less than the time limit ({keys.time}, that is "
            f"{limit:g} s): the job would be told to stop as it starts"
        )
    if keys.container_binds and not keys.container and not isinstance(keys, LumiKeys):
        problems.append("container_binds: there is no container; give its image with container=FILE")
    if isinstance(keys, (JscKeys, JupiterKeys)) and not keys.account:
        problems.append("account: JSC accepts no job without one; give the project that pays with account=PROJECT")
    is_long = isinstance(keys, LeonardoKeys) and not keys.qos and keys.needed_qos == "boost_qos_lprod"
    if is_long and (keys.nodes > 8 or limit > 4 * _DAY_SECONDS):
        problems.append(
            "time: Leonardo allows more than 24 h for up to 8 nodes and 4 days (boost_qos_lprod); give time=24:00:00, "
            "as ckptman submit continues in the next job, or name a qos"
        )
    if isinstance(keys, TorchrunKeys) and keys.spare_nodes and not keys.restarts:
        problems.append("spare_nodes: a spare node takes over when the ranks are restarted; give restarts too")
    if isinstance(keys, LumiKeys) and keys.cpu_masks and keys.tasks != len(keys.cpu_masks.split(",")):
        problems.append(
            f"cpu_masks: {len(keys.cpu_masks.split(','))} masks for {keys.tasks} ranks of a node; give one for each, "
            f"or leave the binding to Slurm with cpu_masks="
        )
    if isinstance(keys, MatrixKeys):
        nodes, tasks = (max(column) for column in zip(*points(keys)))
        if 0 < keys.nodes < nodes:
            problems.append(f"nodes: the largest point needs {nodes}, not {keys.nodes}; 0 means as many")
        if 0 < keys.gpus_per_node < tasks:
            problems.append(
                f"gpus_per_node: the largest point needs {tasks}, not {keys.gpus_per_node}; -1 means as many"
            )
        if keys.tasks_per_node is not None:
            problems.append("tasks_per_node: the points of the matrix say it; leave it out")
    return problems


def _problem(item: Any) -> str:
    place = ".".join(str(part) for part in item["loc"])
    text = item["msg"].removeprefix("Value error, ")
    if item["type"] == "string_pattern_mismatch":
        text = "not in the form it must have; ckptman template NAME --list says what it is"
    return f"{place}: {text[:1].lower()}{text[1:]}, not {item['input']!r}"

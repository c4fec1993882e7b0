"""The templates of Slurm jobs, and their keys: types, defaults and meaning, and which combinations are refused.

One model for each kind of job; a template of `TEMPLATES` has defaults of its own, as for a cluster.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import pydantic
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ckptman.errors import ConfigError, NotFoundError, UnknownKeyError
from ckptman.jobs.slurm.batch_script import limit_seconds

# What no text in a batch script may hold: sbatch reads lines, and a terminal obeys control characters.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_LINE_BREAK = re.compile("[\t\n]")
TRAIN = "python -m ckptman.train --config run.toml"
VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})|(?<![^,:=])~(?=/|$)", re.ASCII)
"""A variable as a user writes it in a path, or a leading `~`."""
_OF_ENVIRONMENT = re.compile(r"\$(?:[A-Z_][A-Z0-9_]*\b|\{[A-Z_][A-Z0-9_]*\})|^~(?=/|$)", re.ASCII)
"""Not `${run.name}` of a configuration library."""
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
_DAY_SECONDS = 86400


def _text(value: str) -> str:
    if found := _CONTROL.search(value):
        raise ValueError(f"a control character ({found[0]!r}) cannot be in a batch script: leave it out")
    return value


def _line(value: str) -> str:
    if found := _LINE_BREAK.search(_text(value)):
        raise ValueError(f"{found[0]!r} would end the #SBATCH line: give it on one line, without tabs")
    return value


def _plain(value: str) -> str:
    if found := VARIABLE.search(_line(value)):
        raise ValueError(f"{found[0]} would not be expanded here: write the value itself")
    return value


def _words(value: str) -> str:
    try:
        words = shlex.split(_text(value))
    except ValueError as error:
        raise ValueError(f"{str(error).lower()}: close the quotes as in a shell") from None
    if not words:
        raise ValueError(f"nothing to run: give a command, such as {TRAIN}")
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
    if limit_seconds(_plain(value)) is None:
        raise ValueError(
            "not a time limit of at least 1 minute: give minutes (90), hours (04:00:00) or days and hours (1-12:00:00)"
        )
    return value


def _name_of_log(value: str) -> str:
    if "%" in _plain(value) or "\\" in value:
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


def _option(value: str) -> str:
    if not re.fullmatch(r"(?s)--[a-z][a-z0-9-]*(=.+)?", _plain(value)):
        raise ValueError(f"{value!r} is not an option: write it as --name=value")
    return value


def _points(value: str) -> str:
    if not value.split() or not all(re.fullmatch(r"[1-9]\d{0,5}x[1-9]\d{0,3}", each) for each in value.split()):
        raise ValueError("write points as nodes x ranks of a node, such as 1x1 1x8 2x8")
    return " ".join(value.split())


Count = Annotated[int, Field(gt=0)]
Text = Annotated[str, AfterValidator(_text)]
"""Shell, or a value in which a line may end."""
Line = Annotated[str, AfterValidator(_line)]
"""A path in which the job expands variables."""
Plain = Annotated[str, AfterValidator(_plain)]
"""A value in which nothing is expanded, and which names no variable."""
Command = Annotated[str, AfterValidator(_words), AfterValidator(_without_variables)]
Prefix = Annotated[str, AfterValidator(_words), AfterValidator(_line)]
Interface = Annotated[str, Field(pattern=r"^[\w.-]*(,[\w.-]+)*$")]
Word = Annotated[str, Field(pattern=r"^[\w.-]*$")]
JobName = Annotated[str, Field(min_length=1), AfterValidator(_name_of_job)]
Time = Annotated[str, AfterValidator(_time)]
Memory = Annotated[str, Field(pattern=r"^(\d+[KMGT]?)?$")]
LogFolder = Annotated[str, Field(min_length=1), AfterValidator(_name_of_log)]
Variables = Annotated[Mapping[str, Text], AfterValidator(_variables)]
Options = tuple[Annotated[str, AfterValidator(_option)], ...]
Masks = Annotated[str, Field(pattern=r"^((0x)?[0-9a-fA-F]+(,(0x)?[0-9a-fA-F]+)*)?$")]


class JobKeys(BaseModel):
    """The keys of every job. An option whose value is empty is left out of the script."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: Command = Field(description="what is run: words, each quoted, so that nothing in them is expanded")
    job_name: JobName = Field("ckptman", description="the name in the queue and of the log")
    account: Plain = Field("", description="the project that pays")
    partition: Plain = Field("", description="where it runs")
    qos: Plain = Field("", description="quality of service")
    time: Time = Field("01:00:00", description="time limit: minutes (90), hours (04:00:00), days (1-12:00:00)")
    cpus_per_task: Count = Field(1, description="cores of one rank")
    mem: Memory = Field("", description="memory of a node, such as 480G")
    log_folder: LogFolder = Field(".", description="where the log goes; it has to be there")
    modules: Plain = Field("", description="modules to load, with blanks between them")
    venv: Line = Field("", description="a virtual environment to activate, inside the container if there is one")
    setup: tuple[Text, ...] = Field((), description="a line of shell, as it is; each further one is added")
    env: Variables = Field({}, description="environment variables: env.NAME=VALUE")
    sbatch: Options = Field((), description="an option of sbatch, such as --constraint=a; each further one is added")

    def misfits(self) -> Iterator[str]:
        """What is wrong between values that are each right."""
        yield from ()


class TrainingKeys(JobKeys):
    """A job of several ranks on GPUs."""

    nodes: Annotated[int, Field(ge=1)] = Field(1, description="nodes")
    gpus_per_node: Annotated[int, Field(ge=0)] = Field(4, description="GPUs of a node; 0: none")
    gpu_type: Word = Field("", description="where a cluster has several, such as h100")
    tasks_per_node: Count | None = Field(None, description="ranks of a node; left out: one per GPU, or one")
    exclusive: bool = Field(False, description="true: no other job on these nodes")
    master_suffix: Word = Field("", description="added to the name of the first node in MASTER_ADDR, such as i at JSC")
    interface: Interface = Field(
        "", description="the network interface of the ranks, such as ib0, where a node has several"
    )
    warning_seconds: Annotated[int, Field(gt=0, le=65535)] = Field(
        180, description="the warning comes that long before the time limit"
    )
    container: Line = Field("", description="the image of a container that the command runs in")
    container_command: Prefix = Field("singularity exec --nv", description="what runs the container")
    container_binds: Line = Field("", description="folders of the host to be seen in there, with commas between them")

    @property
    def tasks(self) -> int:
        """Ranks of a node."""
        return self.tasks_per_node or self.gpus_per_node or 1

    @property
    def size(self) -> dict[str, int]:
        """The size of the job as Slurm is asked for it."""
        return {"nodes": self.nodes, "tasks": self.tasks, "cpus": self.cpus_per_task, "gpus": self.gpus_per_node}

    @property
    def steps_in_container(self) -> list[str]:
        """What is done in the container before the command; `$0` is the virtual environment."""
        return ['source "$0/bin/activate"'] if self.venv else []

    @property
    def time_seconds(self) -> float:
        return limit_seconds(self.time) or 0

    def misfits(self) -> Iterator[str]:
        if self.warning_seconds >= self.time_seconds:
            yield (
                f"warning_seconds: {self.warning_seconds} s is no less than the time limit ({self.time}, that is "
                f"{self.time_seconds:g} s): the job would be told to stop as it starts"
            )
        if self.container_binds and not self.container and not isinstance(self, LumiKeys):
            yield "container_binds: there is no container; give its image with container=FILE"


class TorchrunKeys(TrainingKeys):
    """torchrun starts the ranks of each node, and can restart them."""

    restarts: Annotated[int, Field(ge=0)] = Field(
        0, description="so often torchrun starts the ranks anew within the job"
    )
    spare_nodes: Annotated[int, Field(ge=0)] = Field(
        0, description="so many nodes more, which wait to replace one that dies"
    )

    @property
    def size(self) -> dict[str, int]:
        """One task of Slurm for all ranks of a node."""
        nodes, cpus = self.nodes + self.spare_nodes, self.tasks * self.cpus_per_task
        return {**super().size, "nodes": nodes, "tasks": 1, "cpus": cpus}

    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        if self.spare_nodes and not self.restarts:
            yield "spare_nodes: a spare node takes over when the ranks are restarted; give restarts too"


class JscKeys(TorchrunKeys):
    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        if not self.account:
            yield "account: JSC accepts no job without one; give the project that pays with account=PROJECT"


class LeonardoKeys(TrainingKeys):
    @property
    def needed_qos(self) -> str:
        """The QOS that Leonardo requires for a job of this size; "" if it is the default one."""
        if self.partition != "boost_usr_prod":
            return ""
        if self.time_seconds > _DAY_SECONDS:
            return "boost_qos_lprod"
        return "boost_qos_bprod" if self.nodes > 64 else ""

    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        is_long = not self.qos and self.needed_qos == "boost_qos_lprod"
        if is_long and (self.nodes > 8 or self.time_seconds > 4 * _DAY_SECONDS):
            yield (
                "time: Leonardo allows more than 24 h for up to 8 nodes and 4 days (boost_qos_lprod); give "
                "time=24:00:00, as ckptman submit continues in the next job, or name a qos"
            )


class LumiKeys(TrainingKeys):
    cpu_masks: Masks = Field("", description="the cores of each rank of a node; empty: as Slurm does it")

    @property
    def steps_in_container(self) -> list[str]:
        return ["${WITH_CONDA:-:}", *super().steps_in_container]

    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        masks = self.cpu_masks.split(",")
        if self.cpu_masks and self.tasks != len(masks):
            yield (
                f"cpu_masks: {len(masks)} masks for {self.tasks} ranks of a node; give one for each, or leave the "
                f"binding to Slurm with cpu_masks="
            )


class SuperpodKeys(TrainingKeys):
    dmon_seconds: Count = Field(10, description="a line for each GPU in the log of the GPUs that often")


class MatrixKeys(TrainingKeys):
    """An array of short runs."""

    matrix: Annotated[str, AfterValidator(_points)] = Field(
        "1x1 1x2 1x4 1x8 2x8", description="the points: nodes x ranks of a node, with blanks between them"
    )
    nodes: Annotated[int, Field(ge=0)] = Field(0, description="nodes; 0: as many as the largest point needs")
    gpus_per_node: Annotated[int, Field(ge=-1)] = Field(
        -1, description="GPUs of a node; 0: none; -1: as many as the largest point needs"
    )

    @property
    def largest(self) -> tuple[int, int]:
        """The most nodes, and the most ranks of a node, of any point."""
        nodes, tasks = zip(*(point.split("x") for point in self.matrix.split()))
        return max(map(int, nodes)), max(map(int, tasks))

    @property
    def size(self) -> dict[str, int]:
        nodes, tasks = self.largest
        gpus = tasks if self.gpus_per_node < 0 else self.gpus_per_node
        return {**super().size, "nodes": self.nodes or nodes, "tasks": tasks, "gpus": gpus}

    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        nodes, tasks = self.largest
        if 0 < self.nodes < nodes:
            yield f"nodes: the largest point needs {nodes}, not {self.nodes}; 0 means as many"
        if 0 < self.gpus_per_node < tasks:
            yield f"gpus_per_node: the largest point needs {tasks}, not {self.gpus_per_node}; -1 means as many"
        if self.tasks_per_node is not None:
            yield "tasks_per_node: the points of the matrix say it; leave it out"


@dataclass(frozen=True)
class Template:
    """A template for `ckptman submit`, or without `chain` for `sbatch`. `own`: its defaults where they differ from
    those of `keys`."""

    summary: str
    keys: type[JobKeys]
    own: Mapping[str, Any] = field(default_factory=dict)
    chain: bool = True

    @property
    def defaults(self) -> dict[str, Any]:
        return {**{name: each.default for name, each in self.keys.model_fields.items()}, **self.own}


_TRAINING = {"command": TRAIN, "job_name": "train", "time": "24:00:00", "cpus_per_task": 8}
_POINT = (
    "bash -c 'exec python -m ckptman.train --config run.toml --set run.steps=50 "
    '--set checkpoint.root="runs/scaling/$SCALING_POINT" --set run.log="runs/scaling/$SCALING_POINT.jsonl"\''
)
_LUMI = {
    "partition": "standard-g",
    "mem": "480G",
    "cpus_per_task": 7,  # of 8: the first is the system's
    "gpus_per_node": 8,
    "exclusive": True,
    "container": "pytorch.sif",
    "container_command": "singularity exec",
    # The libraries of the network, and the file systems.
    "container_binds": "/var/spool/slurmd,/opt/cray,/usr/lib64/libcxi.so.1,"
    "/pfs,/scratch,/projappl,/project,/flash,/appl",
    "cpu_masks": "0x00fe000000000000,0xfe00000000000000,0x0000000000fe0000,0x00000000fe000000,"
    "0x00000000000000fe,0x000000000000fe00,0x000000fe00000000,0x0000fe0000000000",
}
_LEONARDO = {"partition": "boost_usr_prod", "mem": "494000", "exclusive": True}
_JUWELS = {"partition": "booster", "cpus_per_task": 12, "master_suffix": "i", "interface": "ib0"}
_JUPITER = {"partition": "booster", "cpus_per_task": 72}
_SUPERPOD = {"cpus_per_task": 14, "gpus_per_node": 8, "exclusive": True}
_SCALING = {"command": _POINT, "job_name": "scaling", "time": "00:30:00"}
_TOKENIZE = {
    "command": "python -m ckptman.train.tokenize tokens text --vocab-size 16384",
    "job_name": "tokenize",
    "time": "04:00:00",
    "cpus_per_task": 16,
}
_VERIFY = {"command": "ckptman verify runs/checkpoints --all", "job_name": "verify", "cpus_per_task": 8}
_PRUNE = {"command": "ckptman prune runs/checkpoints --keep-last 3 --dry-run", "job_name": "prune"}

TEMPLATES: Mapping[str, Template] = {
    "generic": Template("training: srun starts one task per GPU", TrainingKeys, _TRAINING),
    "torchrun": Template("training: one torchrun per node", TorchrunKeys, _TRAINING),
    "leonardo": Template("training on Leonardo: 4 x A100 a node, no internet", LeonardoKeys, _TRAINING | _LEONARDO),
    "lumi": Template("training on LUMI: 8 GCDs a node, in a container", LumiKeys, _TRAINING | _LUMI),
    "jsc": Template("training on JUWELS, JURECA or JUSUF: torchrun, no internet", JscKeys, _TRAINING | _JUWELS),
    "jupiter": Template("training on JUPITER: 4 x GH200 a node, torchrun, no internet", JscKeys, _TRAINING | _JUPITER),
    "superpod": Template(
        "training on a SuperPOD: 8 x H100 or H800 a node, with a log of the GPUs", SuperpodKeys, _TRAINING | _SUPERPOD
    ),
    "tokenize": Template("text to tokens, on CPUs, before the training", JobKeys, _TOKENIZE, chain=False),
    "scaling-matrix": Template("short runs over nodes x GPUs", MatrixKeys, _TRAINING | _SCALING, chain=False),
    "verify": Template("prove checkpoints, on CPUs, every night", JobKeys, _VERIFY, chain=False),
    "prune": Template("delete checkpoints by plan, on CPUs, every night", JobKeys, _PRUNE, chain=False),
}


def find_template(name: str) -> Template:
    """Raises: NotFoundError, which names those there are."""
    if name not in TEMPLATES:
        raise NotFoundError(f"there is no template {name!r}; known: {', '.join(TEMPLATES)}")
    return TEMPLATES[name]


def check_keys(kind: type[JobKeys], values: Mapping[str, Any], where: str) -> JobKeys:
    """Check all values of a template, the defaults of its cluster included.

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
        problems = list(keys.misfits())
    except pydantic.ValidationError as error:
        problems = [_problem(each) for each in error.errors()]
    if problems:
        raise ConfigError("\n  ".join(["wrong values:", *problems] if len(problems) > 1 else problems))
    return keys


def _problem(item: Any) -> str:
    place = ".".join(part for part in item["loc"] if isinstance(part, str))  # no numbers of items
    text = item["msg"].removeprefix("Value error, ")
    if item["type"] == "string_pattern_mismatch":
        text = "not in the form it must have; ckptman template NAME --list says what it is"
    return f"{place}: {text[:1].lower()}{text[1:]}, not {item['input']!r}"

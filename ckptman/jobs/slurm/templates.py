"""Batch scripts: the jinja2 templates of `slurm_templates`, filled with a checked set of keys.

A value in an #SBATCH line goes through the filter `sbatch`, a value anywhere else through `shell`, `words` (a command)
or `expand` (a path in which the job expands variables). Parts that templates share are in the files `_*.sh`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptman.errors import CkptmanError, ConfigError, NotFoundError
from ckptman.jobs.progress import named_by
from ckptman.jobs.slurm.template_keys import (
    TRAIN,
    VARIABLE,
    JobKeys,
    JscKeys,
    LeonardoKeys,
    LumiKeys,
    MatrixKeys,
    SuperpodKeys,
    TorchrunKeys,
    TrainingKeys,
    check_keys,
)

if TYPE_CHECKING:
    from jinja2 import Environment

FOLDER = "slurm_templates"
_PLAIN = re.compile(r"[\w./:=,@%+~^-]*")
_WIDTH = 100
"""Of a value in the comments that a script begins with."""


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


def template(name: str) -> Template:
    """Raises: NotFoundError, which names those there are."""
    if name not in TEMPLATES:
        raise NotFoundError(f"there is no template {name!r}; known: {', '.join(TEMPLATES)}")
    return TEMPLATES[name]


def read_settings(settings: Sequence[str]) -> dict[str, Any]:
    """`KEY=VALUE` each. Of a key given twice the last counts; `setup` and `sbatch` add up. Raises: ConfigError."""
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"--set {setting}: write it as KEY=VALUE, for example --set nodes=4")
        name, dot, variable = key.partition(".")
        if name == "env":
            if not dot:
                raise ConfigError(f"--set {setting}: write it as env.NAME=VALUE, for example --set env.LC_ALL=C")
            values.setdefault("env", {})[variable] = value
        elif key in ("setup", "sbatch"):
            values.setdefault(key, []).append(value)
        else:
            values[key] = value
    return values


def render_template(name: str, values: Mapping[str, Any]) -> str:
    """Return the batch script of a template. Raises: NotFoundError, UnknownKeyError, ConfigError."""
    from jinja2 import TemplateNotFound

    kind = template(name)
    keys = check_keys(kind.keys, {**kind.defaults, **values}, f"template {name}")
    context: dict[str, Any] = {**dict(keys), "name": name, "keys": keys}
    if isinstance(keys, TrainingKeys):
        context |= {"size": _size(keys), "container": _container_words(keys)}
    try:
        return _environment().get_template(f"{name}.sbatch").render(context)
    except TemplateNotFound as error:
        raise CkptmanError(f"{FOLDER}/{error.name} is not in this installation of ckptman: install it again") from None


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    package = Path(__file__).parents[2]
    environment = Environment(
        loader=FileSystemLoader([package / FOLDER, package.parent / FOLDER]),  # as installed, and in a checkout
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "sbatch": _for_sbatch,
        "shell": shlex.quote,
        "words": lambda command: shlex.join(shlex.split(command)),
        "expand": _expanding,
        "one_line": _on_one_line,
        "checkpoints": _checkpoints,
    }
    return environment


def _size(keys: TrainingKeys) -> dict[str, int]:
    """The size of a job as Slurm is asked for it."""
    nodes, tasks, cpus, gpus = keys.nodes, keys.tasks, keys.cpus_per_task, keys.gpus_per_node
    if isinstance(keys, TorchrunKeys):  # one task of Slurm for all ranks of a node
        nodes, tasks, cpus = nodes + keys.spare_nodes, 1, tasks * cpus
    if isinstance(keys, MatrixKeys):
        most_nodes, tasks = keys.largest
        nodes, gpus = nodes or most_nodes, tasks if gpus < 0 else gpus
    return {"nodes": nodes, "tasks": tasks, "cpus": cpus, "gpus": gpus}


def _container_words(keys: TrainingKeys) -> str:
    """Return what a command begins with to run in the container, its environments activated; "" without one."""
    if not keys.container:
        return ""
    binds = [f"--bind={keys.container_binds}"] if keys.container_binds else []
    words = " ".join(map(_expanding, [*shlex.split(keys.container_command), *binds, keys.container]))
    steps = ["${WITH_CONDA:-:}"] * isinstance(keys, LumiKeys) + ['source "$0/bin/activate"'] * bool(keys.venv)
    if not steps:
        return words
    script = "".join(f"{step} || exit 2; " for step in steps) + 'exec "$@"'
    return f"{words} bash -c {shlex.quote(script)} {_expanding(keys.venv) if keys.venv else 'bash'}"


def _for_sbatch(text: str) -> str:
    """A word as sbatch reads it. Not as a shell does: a backslash counts within quotes of both kinds, and nowhere does
    it hold a word with a blank together."""
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _expanding(text: str) -> str:
    """Quote a word for the shell, so that the job expands `$NAME`, `${NAME}` and a leading `~`, and nothing else."""
    quoted, end = "", 0
    for found in VARIABLE.finditer(text):
        name = found[1] or found[2] or "HOME"
        if not found.start() and text[found.end() :].startswith("/"):
            name += ":?"  # else a variable that is not set would make it a path at the top
        quoted += (shlex.quote(text[end : found.start()]) if found.start() > end else "") + f'"${{{name}}}"'
        end = found.end()
    return quoted + (shlex.quote(text[end:]) if text[end:] or not quoted else "")


def _checkpoints(command: str) -> str:
    """Return where a command says that its checkpoints go, for people."""
    words = shlex.split(command)
    if "ckptman.train" in words and "--config" in words[:-1]:
        return f"`root` of [checkpoint] in {words[words.index('--config') + 1]}"
    return ", ".join(named_by(command, (), {})) or "where the command saves them"


def _on_one_line(text: str) -> str:
    """A text for a comment, which must not end its line."""
    line = " ".join(text.split())
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}..."

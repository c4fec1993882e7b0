"""Batch scripts from the files of `slurm_templates` and a checked set of keys.

In a template `@key@` stands for a value. Three rules make it what it becomes:
- an #SBATCH line with a value that is empty is left out, as is a line that is nothing but an empty value;
- a value in an #SBATCH line is escaped as sbatch reads it, anywhere else it is quoted for the shell;
- `@include part@` stands for the file `_part.sh`, so that what templates share is written once.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptman.errors import CkptmanError, ConfigError, NotFoundError
from ckptman.scheduler.slurm.template_keys import (
    JobKeys,
    LeonardoKeys,
    LumiKeys,
    MatrixKeys,
    PruneKeys,
    SuperpodKeys,
    TokenizeKeys,
    TorchrunKeys,
    TrainingKeys,
    VerifyKeys,
    check_keys,
    points,
)

FOLDER = "slurm_templates"
_PLACE = re.compile(r"@(\w+)@")
_INCLUDE = re.compile(r"@include (\w+)@")
_LONE = re.compile(r"\s*@(\w+)@( \\)?")
_PLAIN = re.compile(r"[\w./:=,@%+~^-]*")
_DIRECTIVE = "#SBATCH"
_OWN_STORE = """\
# Ranks that are restarted meet in a store of their own each time. In torchrun's they would look for each other under a
# count of restarts, which differs from node to node.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"""
_FIRST_FLUSH = """\
# Queued again, torchrun may give the places to nodes that held nothing, and keep in reserve one that held a part.
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
    flush_memory
fi"""
_FINISHED = """\
# A node that died on the way, and one that was not needed, end with a code of their own.
if grep -qs '"state": "finished"' "$CKPTMAN_OUTCOME"; then
    code=0
fi"""


@dataclass(frozen=True)
class Template:
    """`keys`: the model of what can be set. `chain`: whether it is for `ckptman submit` rather than for `sbatch`."""

    summary: str
    keys: type[JobKeys]
    chain: bool = True


TEMPLATES: Mapping[str, Template] = {
    "generic": Template("training: srun starts one task per GPU", TrainingKeys),
    "torchrun": Template("training: one torchrun per node", TorchrunKeys),
    "leonardo": Template("training on Leonardo: 4 x A100 a node, no internet", LeonardoKeys),
    "lumi": Template("training on LUMI: 8 GCDs a node, in a container", LumiKeys),
    "superpod": Template("training on a SuperPOD: 8 x H100 or H800 a node, with a log of the GPUs", SuperpodKeys),
    "tokenize": Template("text to tokens, on CPUs, before the training", TokenizeKeys, chain=False),
    "scaling-matrix": Template("short runs over nodes x GPUs", MatrixKeys, chain=False),
    "verify": Template("prove checkpoints, on CPUs, every night", VerifyKeys, chain=False),
    "prune": Template("delete checkpoints by plan, on CPUs, every night", PruneKeys, chain=False),
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
    keys = check_keys(template(name).keys, values, f"template {name}")
    directives, shell = _for_directives(keys), _for_shell(keys)
    text = _INCLUDE.sub(lambda found: _read(f"_{found[1]}.sh").rstrip("\n"), _read(f"{name}.sbatch"))
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(_DIRECTIVE):
            lines += _directive_lines(line, directives)
        elif (lone := _LONE.fullmatch(line)) and not shell[lone[1]]:
            continue
        else:
            lines.append(_PLACE.sub(lambda found: shell[found[1]], line))
    return "\n".join(lines) + "\n"


def _read(name: str) -> str:
    """A file of `slurm_templates`: in an installed ckptman it lies in the package, in a checkout beside it."""
    package = Path(__file__).parents[2]
    for folder in (package / FOLDER, package.parent / FOLDER):
        try:
            return (folder / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            continue
    raise CkptmanError(f"{FOLDER}/{name} is not in this installation of ckptman: install it again")


def _directive_lines(line: str, values: Mapping[str, Sequence[str]]) -> list[str]:
    """One line for each value; none where it is empty. Only the last place of a line may have several."""
    names = _PLACE.findall(line)
    if not names:
        return [line]
    if not all(values[name] for name in names):
        return []
    *single, many = names
    for name in single:
        line = line.replace(f"@{name}@", _for_sbatch(values[name][0]))
    return [line.replace(f"@{many}@", _for_sbatch(value)) for value in values[many]]


def _for_sbatch(text: str) -> str:
    """A word as sbatch reads it. Not as a shell does: a backslash counts within quotes of both kinds, and nowhere does
    it hold a word with a blank together."""
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _for_directives(keys: JobKeys) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in keys:
        if isinstance(value, bool):
            found[name] = [f"--{name}"] * value
        elif isinstance(value, (str, int)):
            found[name] = [str(value)] if value else []
        elif name == "sbatch":
            found[name] = list(value)
    if isinstance(keys, TrainingKeys):
        tasks, gpus, nodes = keys.tasks, keys.gpus_per_node, keys.nodes
        if isinstance(keys, MatrixKeys):
            most_nodes, tasks = (max(column) for column in zip(*points(keys)))
            nodes, gpus = nodes or most_nodes, tasks if gpus < 0 else gpus
            found["array"] = [f"0-{len(points(keys)) - 1}"]
        if isinstance(keys, TorchrunKeys):
            nodes += keys.spare_nodes
            found["no_kill"] = ["--no-kill"] * bool(keys.restarts)
        found["nodes"] = [str(nodes)]
        found["tasks_per_node"] = [str(tasks)]
        found["node_cpus"] = [str(tasks * keys.cpus_per_task)]
        found["gpus"] = [f"{keys.gpu_type}:{gpus}" if keys.gpu_type else str(gpus)] if gpus else []
    return found


def _for_shell(keys: JobKeys) -> dict[str, str]:
    found = {name: shlex.quote(str(value)) for name, value in keys if isinstance(value, (str, int))}
    found["command"] = shlex.join(shlex.split(keys.command))
    found["modules"] = f"module load {shlex.join(keys.modules.split())} || exit 2" if keys.modules.split() else ""
    found["venv"] = f"source {shlex.quote(f'{keys.venv}/bin/activate')} || exit 2" if keys.venv else ""
    found["setup"] = "\n".join(keys.setup)
    found["env"] = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in keys.env.items())
    if isinstance(keys, TrainingKeys):
        found["tasks_per_node"] = str(keys.tasks)
        names = (f"{backend}_SOCKET_IFNAME={keys.interface}" for backend in ("GLOO", "NCCL"))
        found["interface"] = f"export {' '.join(names)}" if keys.interface else ""
        found["container"] = ""
        if keys.container:
            binds = [f"--bind={keys.container_binds}"] if keys.container_binds else []
            found["container"] = shlex.join([*shlex.split(keys.container_command), *binds, keys.container])
        found["finished"] = ""
    if isinstance(keys, TorchrunKeys):
        found |= _of_torchrun(keys)
    if isinstance(keys, LumiKeys):
        found["cpu_masks"] = f"--cpu-bind=mask_cpu:{keys.cpu_masks}" if keys.cpu_masks else ""
    if isinstance(keys, MatrixKeys):
        found["points"] = keys.matrix
    return found


def _of_torchrun(keys: TorchrunKeys) -> dict[str, str]:
    """How torchrun and its step are started, with or without restarts of the ranks within the job."""
    found = {
        "step_options": "--kill-on-bad-exit=1",
        "launcher": "torchrun",
        "world_nodes": '"$SLURM_JOB_NUM_NODES"',
        **dict.fromkeys(("max_restarts", "own_store", "first_flush", "first_node", "first_node_end", "finished"), ""),
    }
    if keys.restarts:
        found |= {
            "max_restarts": f"--max-restarts={keys.restarts}",
            "own_store": _OWN_STORE,
            "first_node": _read("_first_node.sh"),
            "first_node_end": 'kill "$watch" 2> /dev/null\nwait "$watch" 2> /dev/null',
        }
    if keys.spare_nodes:
        found |= {
            "step_options": "--no-kill --kill-on-bad-exit=0 --wait=0",
            "launcher": "python -m ckptman.train.torchrun",
            "world_nodes": str(keys.nodes),
            "first_flush": _FIRST_FLUSH,
            "finished": _FINISHED,
        }
    return found

"""Batch scripts from the files of `slurm_templates` and a checked set of keys.

In a template `@key@` stands for a value. Three rules make it what it becomes:
- an #SBATCH line with a value that is empty is left out, as is a line that is nothing but an empty value;
- a value in an #SBATCH line is escaped as sbatch reads it, anywhere else it is quoted for the shell;
- `@include part@` is replaced by the file `_part.sh`, for text that templates share.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptman.errors import CkptmanError, ConfigError, NotFoundError
from ckptman.jobs.progress import named_by
from ckptman.jobs.slurm.template_keys import (
    VARIABLE,
    JobKeys,
    JscKeys,
    JupiterKeys,
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
_WIDTH = 100
"""Of a value in the comments that a script begins with."""
_NODE_SETUP = (
    'case ",${PET_RDZV_CONF:-}" in *,is_host=*) ;; '
    '*) PET_RDZV_CONF="${PET_RDZV_CONF:+$PET_RDZV_CONF,}is_host=$((SLURM_NODEID == 0))" ;; esac; export PET_RDZV_CONF'
)
"""Run on each node before torchrun."""
_NODE_ADDRESS = '; export PET_LOCAL_ADDR="${{PET_LOCAL_ADDR:-$(hostname -s){suffix}}}"'
"""The address of this node for the others. That of one node becomes the MASTER_ADDR of torchrun's workers."""
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
    "jsc": Template("training on JUWELS, JURECA or JUSUF: torchrun, no internet", JscKeys),
    "jupiter": Template("training on JUPITER: 4 x GH200 a node, torchrun, no internet", JupiterKeys),
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
    text = _read(f"{name}.sbatch")
    while _INCLUDE.search(text):
        text = _INCLUDE.sub(lambda found: _read(f"_{found[1]}.sh").rstrip("\n"), text)
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
    found: dict[str, list[str]] = {"array": [], "no_kill": [], "log_name": ["%x-%j.out"]}
    for name, value in keys:
        if isinstance(value, bool):
            found[name] = [f"--{name}"] * value
        elif isinstance(value, (str, int)):
            found[name] = [str(value)] if value else []
        elif name == "sbatch":
            found[name] = list(value)
    if isinstance(keys, TrainingKeys):
        tasks, cpus, gpus, nodes = keys.tasks, keys.cpus_per_task, keys.gpus_per_node, keys.nodes
        if isinstance(keys, MatrixKeys):
            most_nodes, tasks = (max(column) for column in zip(*points(keys)))
            nodes, gpus = nodes or most_nodes, tasks if gpus < 0 else gpus
            found |= {"array": [f"0-{len(points(keys)) - 1}"], "log_name": ["%x-%A_%a.out"]}
        if isinstance(keys, TorchrunKeys):  # one task of Slurm for all ranks of a node
            tasks, cpus = 1, tasks * cpus
            nodes += keys.spare_nodes
            found["no_kill"] = ["--no-kill"] * bool(keys.restarts)
        if isinstance(keys, LeonardoKeys):
            found["qos"] = [qos] if (qos := keys.qos or keys.needed_qos) else []
        found["nodes"] = [str(nodes)]
        found["tasks_per_node"] = [str(tasks)]
        found["cpus_per_task"] = [str(cpus)]
        option = "--gpus-per-node=" if isinstance(keys, LumiKeys) else "--gres=gpu:"
        found["gpus"] = [f"{option}{keys.gpu_type}{':' * bool(keys.gpu_type)}{gpus}"] if gpus else []
    return found


def _for_shell(keys: JobKeys) -> dict[str, str]:
    found = {name: shlex.quote(str(value)) for name, value in keys if isinstance(value, (str, int))}
    found["command"] = shlex.join(shlex.split(keys.command))
    found["modules"] = f"module load {shlex.join(keys.modules.split())} || exit 2" if keys.modules.split() else ""
    found["venv"] = f"source {_expanding(f'{keys.venv}/bin/activate')} || exit 2" if keys.venv else ""
    found["setup"] = "\n".join(keys.setup)
    found["env"] = "\n".join(f"export {name}={_expanding(value)}" for name, value in keys.env.items())
    found["command_shown"] = _on_one_line(keys.command)
    found["log_shown"] = f"{keys.log_folder}/{keys.job_name}-JOB{'_TASK' * isinstance(keys, MatrixKeys)}.out"
    if isinstance(keys, TrainingKeys):
        found |= _of_training(keys)
    if isinstance(keys, TorchrunKeys):
        found |= _of_torchrun(keys)
    if isinstance(keys, LumiKeys) and keys.cpu_masks:
        found["cpu_masks"] = f"--cpu-bind=mask_cpu:{keys.cpu_masks}"
    if isinstance(keys, MatrixKeys):
        found["points"] = keys.matrix
    return found


def _of_training(keys: TrainingKeys) -> dict[str, str]:
    names = (f"{backend}_SOCKET_IFNAME={keys.interface}" for backend in ("GLOO", "NCCL"))
    found = {
        "tasks_per_node": str(keys.tasks),
        "master_suffix": keys.master_suffix,
        "interface": f"export {' '.join(names)}" if keys.interface else "",
        "checkpoints": _on_one_line(_checkpoints(keys.command)),
        **dict.fromkeys(("container", "cpu_masks", "finished"), ""),
    }
    if keys.container:
        binds = [f"--bind={keys.container_binds}"] if keys.container_binds else []
        words = [*shlex.split(keys.container_command), *binds, keys.container]
        found |= {"container": " ".join(map(_expanding, words)) + _inside(keys), "venv": ""}
    return found


def _inside(keys: TrainingKeys) -> str:
    """Return the words that activate environments within the container; the words of a command follow."""
    steps = ["${WITH_CONDA:-:}"] * isinstance(keys, LumiKeys) + ['source "$0/bin/activate"'] * bool(keys.venv)
    if not steps:
        return ""
    script = "".join(f"{step} || exit 2; " for step in steps) + 'exec "$@"'
    return f" bash -c {shlex.quote(script)} {_expanding(keys.venv) if keys.venv else 'bash'}"


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


def _of_torchrun(keys: TorchrunKeys) -> dict[str, str]:
    """How torchrun and its step are started, with or without restarts of the ranks within the job."""
    found = {
        "step_options": "--kill-on-bad-exit=1",
        "launcher": "torchrun",
        "world_nodes": '"$SLURM_JOB_NUM_NODES"',
        "node_setup": _NODE_SETUP,
        **dict.fromkeys(("max_restarts", "own_store", "first_flush", "first_node", "first_node_end", "finished"), ""),
    }
    if keys.master_suffix:
        found["node_setup"] += _NODE_ADDRESS.format(suffix=keys.master_suffix)
    found["node_setup"] = shlex.quote(f'{found["node_setup"]}; exec "$@"')
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

"""Batch scripts: the jinja2 templates of `slurm_templates`, filled with a checked set of keys.

A value in an #SBATCH line goes through the filter `sbatch`, a value anywhere else through `shell`, `words` (a command)
or `expand` (a path in which the job expands variables). Parts that templates share are in the files `_*.sh`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptman.errors import CkptmanError, ConfigError
from ckptman.jobs.newest_checkpoints import named_by
from ckptman.jobs.slurm.template_keys import VARIABLE, JobKeys, TrainingKeys, check_keys, find_template

if TYPE_CHECKING:
    from jinja2 import Environment

FOLDER = "slurm_templates"
_PLAIN = re.compile(r"[\w./:=,@%+~^-]*")
_LISTS = {name for name, each in JobKeys.model_fields.items() if isinstance(each.default, tuple)}
_WIDTH = 100
"""Of a value in the comments that a script begins with."""


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
        elif key in _LISTS:
            values.setdefault(key, []).append(value)
        else:
            values[key] = value
    return values


def render_template(name: str, values: Mapping[str, Any]) -> str:
    """Return the batch script of a template. Raises: NotFoundError, UnknownKeyError, ConfigError."""
    from jinja2 import TemplateNotFound

    kind = find_template(name)
    keys = check_keys(kind.keys, {**kind.defaults, **values}, f"template {name}")
    context: dict[str, Any] = {**dict(keys), "name": name, "keys": keys}
    if isinstance(keys, TrainingKeys):
        context |= {"size": keys.size, "container": _container_words(keys)}
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


def _container_words(keys: TrainingKeys) -> str:
    """Return what a command begins with to run in the container, its environments activated; "" without one."""
    if not keys.container:
        return ""
    binds = [f"--bind={keys.container_binds}"] if keys.container_binds else []
    words = " ".join(map(_expanding, [*shlex.split(keys.container_command), *binds, keys.container]))
    if not keys.steps_in_container:
        return words
    script = "".join(f"{step} || exit 2; " for step in keys.steps_in_container) + 'exec "$@"'
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

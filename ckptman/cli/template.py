"""`ckptman template NAME`: a batch script for Slurm, from a template and checked values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptman.cli import console
from ckptman.cli.options import flag, option, path_argument
from ckptman.errors import ConfigError, ExistsError, NotFoundError

if TYPE_CHECKING:
    from ckptman.jobs.slurm.template_keys import Template


def template(
    name: Annotated[str | None, path_argument("[NAME]", "The template: see --list.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", show_default=False, help="Write it to a file, not to the screen."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None, option("--set", "KEY=VALUE", "A value, such as nodes=4. May be given several times.")
    ] = None,
    config: Annotated[Path | None, option("--config", "FILE", "Values from a TOML file; --set goes before it.")] = None,
    listing: Annotated[bool, flag("--list", "List the templates; with NAME, its keys and what they are.")] = False,
    force: Annotated[bool, flag("--force", "Overwrite FILE.")] = False,
    as_json: Annotated[bool, flag("--json", "With --list: print JSON, for programs.")] = False,
) -> None:
    """Make a batch script for Slurm from a template, for ckptman submit or sbatch."""
    from ckptman.jobs.slurm.template_keys import TEMPLATES, find_template
    from ckptman.jobs.slurm.templates import read_settings, render_template
    from ckptman.train.config import read_toml

    if listing:
        _list_keys(name, find_template(name), as_json) if name else _list_templates(TEMPLATES, as_json)
        return
    if name is None:
        raise ConfigError("which template? ckptman template --list says which there are")
    if as_json:
        raise ConfigError("--json: only with --list; a batch script is text")
    if force and output is None:
        raise ConfigError("--force: it overwrites the file of -o, and there is none")
    kind = find_template(name)
    given = read_settings(settings or [])
    from_file = read_toml(config) if config else {}
    merged = {**from_file, **given}
    if isinstance(from_file.get("env"), dict):
        merged["env"] = {**from_file["env"], **given.get("env", {})}
    script = render_template(name, merged)
    if output is None:
        console.write(script.removesuffix("\n"))
    else:
        _write(output, script, force)
        console.say(f"wrote {output}: submit it with {'ckptman submit' if kind.chain else 'sbatch'}")
    folder = Path(str(merged.get("log_folder", ".")))
    if not folder.is_dir():
        console.remark(
            f"note: make the folder {folder} before you submit: Slurm does not, and without it the job "
            f"fails and says nothing"
        )


def _write(path: Path, script: str, force: bool) -> None:
    try:
        with open(path, "w" if force else "x", encoding="utf-8") as file:
            file.write(script)
    except FileExistsError:
        raise ExistsError(f"{path} is there already: give another name to -o, or overwrite it with --force") from None
    except FileNotFoundError:
        raise NotFoundError(f"there is no folder {path.parent}: make it first, or give another name to -o") from None


def _list_templates(templates: Mapping[str, Template], as_json: bool) -> None:
    if as_json:
        facts = [{"name": name, "summary": each.summary, "chain": each.chain} for name, each in templates.items()]
        console.say_json(facts)
        return
    rows = [(name, each.summary, "ckptman submit" if each.chain else "sbatch") for name, each in templates.items()]
    console.say(*console.table(("template", "what it is for", "submit with"), rows, drop=("submit with",)))


def _list_keys(name: str, kind: Template, as_json: bool) -> None:
    defaults, fields = kind.defaults, kind.keys.model_fields
    facts = [{"key": key, "default": defaults[key], "what": field.description} for key, field in fields.items()]
    if as_json:
        console.say_json({"name": name, "summary": kind.summary, "keys": facts})
        return
    rows = [(each["key"], _shown(each["default"]), each["what"]) for each in facts]
    console.say(*console.table(("key", "default", "what"), rows))


def _shown(value: Any) -> str:
    if value in (None, "", (), {}):
        return "-"
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    return console.cut(shown, 40)

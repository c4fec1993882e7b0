"""README.md and docs/ are run: each page is a session in a folder of its own, from top to bottom.

- A ```python block whose first line is `# name.py` is written to that file, as is a ```toml block. One that begins with
  `>>>` is run by doctest. Any other is run as a script.
- In a ```console block each `$ command` is run. It must end with the code that the page says, such as
  `# exit code 75`, or with 0. What the page shows below it must be in its output, line by line, up to blanks; a line
  `...` stands for any number of lines. Its figures are those of the run that made it: steps and counts exactly, sizes
  up to 3 %, losses and other fractions up to 0.5 %. Times, rates, dates, ids and folders differ from run to run.
- `make` and `pip install` are not run: their targets and extras have to exist.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from inspect import signature
from pathlib import Path

import pytest
import typer

import ckptman
from ckptman import errors
from ckptman.cli.app import make_app
from ckptman.policies import retention_plan
from ckptman.policies import save_policies as saving
from ckptman.runtime.outcome import Outcome
from ckptman.storage.format.index import Index
from ckptman.storage.format.manifest import Manifest
from ckptman.train.config import Config
from tests.helpers.forkserver import programs

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).parents[2]
SLURM_PAGE = "slurm.md"
"""Run on a real Slurm, by tests/slurm."""
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
QUICK_PAGES = {
    *("README.md", "command-line.md", "policies.md", "errors.md"),
    *("faults.md", "format.md", "internals.md", "journal.md"),
}
"""Run by `make test`; the others by `make test-all`."""
LIMIT_SECONDS = 90.0
UNWANTED = ("SLURM_", "CKPTMAN_", "TORCHELASTIC_", "MASTER_", "PYTEST_")
ENVIRON = dict(os.environ)
"""Looked at once: pages run in threads, while pytest changes it."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: what it is written in, its text, and the line it begins at."""

    page: str
    line: int
    language: str
    text: str

    @property
    def where(self):
        return f"{self.page}:{self.line}"


@cache
def text_of(page):
    return (REPOSITORY / ("." if page == "README.md" else "docs") / page).read_text(encoding="utf-8")


def blocks(page):
    """The fenced blocks of a page, in order."""
    found = []
    opened = None
    lines = []
    for number, line in enumerate(text_of(page).splitlines(), 1):
        if line.startswith("```"):
            if opened is None:
                opened, lines = (number, line[3:].strip()), []
            else:
                found.append(Block(page, *opened, "\n".join(lines) + "\n"))
                opened = None
        elif opened is not None:
            lines.append(line)
    assert opened is None, f"{page}:{opened} is not closed"
    return found


@dataclass(frozen=True)
class Command:
    """A `$` line, the exit code it is to have, and the output that the page shows."""

    where: str
    text: str
    code: int
    shown: list[str]


def commands(block):
    """The commands of a console block."""
    found = []
    for offset, line in enumerate(block.text.splitlines(), 1):
        if line.startswith("$ "):
            text, _, code = line[2:].partition("  # exit code ")
            found.append(Command(f"{block.page}:{block.line + offset}", text, int(code or 0), []))
        elif line.strip():
            assert found, f"{block.where}: output without a command"
            found[-1].shown.append(line)
    return found


def run_page(page, folder):
    """One session: everything on the page that can be run, in order, in `folder`."""
    for block in blocks(page):
        name = re.match(r"# ([\w-]+\.(?:py|toml|sbatch))\n", block.text)
        if name is not None:
            # The first line of a batch script names its interpreter.
            (folder / name[1]).write_text(block.text[name.end() :] if name[1].endswith("sbatch") else block.text)
        elif block.language == "python":
            script = folder / ".block.txt"
            script.write_text(block.text)
            doctest = "-m doctest " if block.text.startswith(">>>") else ""
            run(Command(block.where, f"python {doctest}{script}", 0, []), folder)
        elif block.language == "console":
            for command in commands(block):
                if not is_looked_up(command):
                    run(command, folder)


def run(command, folder):
    """Run a command as a user would, with this Python's programs first on the path."""
    env = {name: value for name, value in ENVIRON.items() if not name.startswith(UNWANTED)}
    env |= {name: os.environ[name] for name in ("PATH", "SLURM_CONF") if name in os.environ}
    path = [programs(), Path(sys.executable).parent, env["PATH"]]
    # Lines come as on a terminal, and are not lost to a kill.
    env |= {"PATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        ["bash", "-c", command.text],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    assert code == command.code, f"{command.where}: $ {command.text}\nended with {code}:\n{output}"
    rest = iter(output.splitlines())
    same = says if command.where.startswith(SLURM_PAGE) else tells  # numbers of jobs go on from test to test
    for line in command.shown:
        assert line.strip() == "..." or any(same(line, each) for each in rest), (
            f"{command.where}: $ {command.text}\ndoes not print, here: {line}\nbut:\n{output}"
        )


def alike(line):
    """A line with each word that has a digit in it as `#`, with the unit of a duration."""
    return " ".join(re.sub(r"\S*\d\S*(?: (?:ms|s|min|h|d)\b)?", "#", line).split())


def says(shown, line):
    """Whether a line is the one that a page shows, but for its figures."""
    return alike(line) == alike(shown)


def tells(shown, line):
    """Whether a line is the one that a page shows."""
    expected, found = figures(shown), figures(line)
    return (
        says(shown, line)
        and len(expected) == len(found)
        and all(each == pytest.approx(other, rel=tolerance) for (each, tolerance), (other, _) in zip(found, expected))
    )


DIFFER = re.compile(
    r"""(?<![\w.])[\d.,]+\ ?(?:m?s|min|h|d)\b (?!/) | [\d.,]+\ (?:\w+/s|times)\b  # times, rates
    | (?<=\ )[\d.]+%$ | goodput\ [\d.]+%  # shares of times
    | \d{4}-\d\d-\d\d\ \d\d:\d\d:\d\d | "time_seconds":.* | \b[\da-f]{12,}\b | \d{8}-\d{6}-\d+  # dates, digests, ids
    | (?:(?<!\d)/|[A-Za-z~.][\w.~-]*/)+ | ^\ \ python\b.*  # folders, the version of Python""",
    re.VERBOSE,
)
UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def figures(line):
    """The figures of a line that are the same in each run, and how far off each may be, as a fraction."""
    numbers = re.findall(r"(?<![\w.])(\d[\d,]*)(\.\d+)?(?: ([kMGTKi]*B)(?![\w/]))?", DIFFER.sub(" ", line))
    return [
        (float(whole.replace(",", "") + part) * UNITS.get(unit, 1), 0.03 if unit else 0.005 if part else 0)
        for whole, part, unit in numbers
    ]


def test_a_figure_that_is_off_is_not_what_the_page_says():
    assert tells("step 50: 5 files, 212.1 KiB, 16 tensors", "step 50: 5 files,  209.9 KiB, 16 tensors")
    assert not tells("step 50: 5 files, 212.1 KiB, 16 tensors", "step 40: 5 files, 212.1 KiB, 16 tensors")
    assert tells("seen 3 s ago, 1 MB/s", "seen 4000 s ago, 700 MB/s")
    assert not tells("7.1 MiB in all, at most 132.0 KiB", "103.8 MiB in all, at most 128.0 KiB")
    assert not tells("7.1 MiB in all", "7.1 KiB in all")
    assert not tells("digests 323.1 kB", "digests 76.03 kB")
    assert tells("in /home/me/run/step-0000000060", "in /tmp/x7/run/step-0000000060")
    assert not tells("in /home/me/run/step-0000000060", "in /tmp/x7/run/step-0000000040")
    assert tells(" 100  5 s  loss=5.932  complete", " 100  1 s  loss=5.931  complete")
    assert not tells("step 30/30  loss 6.1705", "step 20/30  loss 6.1705")
    assert not tells(" 100  5 s  loss=5.932  complete", " 100  1 s  loss=25.9  complete")


def is_looked_up(command):
    """Whether this is a `make` or `pip install`, which are not run here but must be possible."""
    words = command.text.split()
    if words[0] == "make":
        targets = re.findall(r"^(\w+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= set(targets), f"{command.where}: the Makefile has the targets {targets}"
        return True
    if command.text.startswith("pip install "):
        project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
        found = re.fullmatch(r"'?(?:\.|ckptman)(?:\[(\w+)\])?'?", words[2])
        assert found, f"{command.where}: what does it install?"
        assert not found[1] or found[1] in project["optional-dependencies"], f"{command.where}: no extra {found[1]}"
        return True
    return False


Sessions = dict[str, "Future[None]"]


@pytest.fixture(scope="module")
def sessions(request, tmp_path_factory):
    """Two pages at a time: most of a session is waiting for torch to be imported."""
    wanted = {item.callspec.params.get("page") for item in request.session.items if hasattr(item, "callspec")}
    with ThreadPoolExecutor(2) as pool:
        yield {
            page.name: pool.submit(run_page, page.name, tmp_path_factory.mktemp(page.stem))
            for page in PAGES
            if page.name in wanted
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.leaves("")  # other pages run meanwhile
@pytest.mark.timeout(400)  # pages wait for one another; LIMIT_SECONDS holds for each of their commands
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page.name, marks=[] if page.name in QUICK_PAGES else pytest.mark.slow)
        for page in PAGES
        if page.name != SLURM_PAGE
    ],
)
def test_everything_on_the_page_runs_as_it_says(page, sessions):
    sessions[page].result()


def test_all_links_resolve():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)]+)\)", without_code(page.name)):
            if "://" in target:
                continue
            name, _, anchor = target.partition("#")
            there = (page.parent / name).resolve() if name else page
            assert there.exists(), f"{page.name}: {target}"
            if anchor:
                assert anchor in anchors(there.name), f"{page.name}: {target} is none of {anchors(there.name)}"


def test_every_page_is_linked_from_the_readme():
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)", text_of("README.md")))
    assert linked == {page.name for page in PAGES} - {"README.md", "index.md"}


def test_every_public_name_is_in_the_docs():
    everything = "\n".join(text_of(page.name) for page in PAGES)
    missing = [name for name in ckptman.__all__ if not re.search(rf"\b{name}\b", everything)]
    assert not missing
    imported = ",".join(re.findall(r"from ckptman import \(?([\w, \n]+)", everything))
    used = {*re.split(r"\W+", imported), *re.findall(r"\bckptman\.([A-Z]\w+)", everything)} - {""}
    assert "Checkpointer" in used
    assert not used - set(ckptman.__all__)
    assert all(hasattr(ckptman, name) for name in ckptman.__all__)


def test_every_verb_and_option_is_in_the_command_line_page():
    page = text_of("command-line.md")
    for name, verb in typer.main.get_command(make_app()).commands.items():
        assert f"## ckptman {name}" in page
        assert f"| [`ckptman {name}`](#ckptman-{name}) | " in page
        for option in (option for each in verb.params if each.param_type_name == "option" for option in each.opts):
            assert f"`{option}" in page, f"{name} {option}"


def test_every_policy_and_parameter_is_in_the_policies_page():
    page = text_of("policies.md")
    for module, base in ((saving, saving.SavePolicy), (retention_plan, retention_plan.RetentionPolicy)):
        for name, policy in vars(module).items():
            if isinstance(policy, type) and issubclass(policy, base) and name in dir(ckptman) and policy != base:
                assert f"`{name}`" in page
                missing = [each for each in signature(policy).parameters if not re.search(rf"\b{each}\b", page)]
                assert not missing, f"{name}: {missing}"
    assert not [name for name in saving.Facts._fields if f"`{name}`" not in page]


def test_every_parameter_of_the_checkpointer_is_in_the_docs():
    page = text_of("getting-started.md")
    missing = [name for name in signature(ckptman.Checkpointer).parameters if f"`{name}`" not in page]
    assert not missing


def test_every_configuration_key_is_shown():
    shown = (REPOSITORY / "examples" / "run.toml").read_text() + text_of("training-loop.md")
    for section, field in Config.model_fields.items():
        assert f"[{section}]" in shown
        keys = field.annotation.model_fields
        missing = [key for key in keys if not re.search(rf"\b{key}\b", shown)]
        assert not missing, f"[{section}] {missing}"


def test_every_field_on_disk_is_in_the_format_page():
    page = text_of("format.md")
    assert not [field for model in (Manifest, Index) for field in model.model_fields if f"`{field}`" not in page]
    assert not [field for field in Outcome.__dataclass_fields__ if f"`{field}`" not in text_of("stopping.md")]


def test_every_event_is_in_the_journal_page():
    calls = re.compile(r"(?:\.note|\._note|\.record|\.end)\(\s*(?:\"(\w+)\"|state)")
    files = [path for path in (REPOSITORY / "ckptman").rglob("*.py") if "jobs" not in path.parts]  # of chains
    events = {event for file in files for event in calls.findall(file.read_text()) if event} | {
        "finished",
        "stopped",
        "failed",
    }
    missing = sorted(event for event in events if f"`{event}`" not in text_of("journal.md"))
    assert len(events) > 10
    assert not missing


def test_every_error_is_in_the_errors_page_with_its_exit_code():
    page = text_of("errors.md")
    for name, error in vars(errors).items():
        if isinstance(error, type) and issubclass(error, errors.CkptmanError):
            assert re.search(rf"^\| `{name}` \| {error.exit_code} \|", page, re.MULTILINE), name


GUIDES = {name: (REPOSITORY / name).read_text(encoding="utf-8") for name in ("docs/internals.md", "CONTRIBUTING.md")}
CLASSES_OF_OTHERS = {"DTensor"}


@pytest.mark.parametrize("guide", GUIDES)
def test_every_module_and_name_in_a_guide_to_the_code_exists(guide):
    """A path is below `ckptman/` or the repository, or beside the one before; `name()` is in a module of its item."""
    text = re.sub(r"```.*?```", "", GUIDES[guide], flags=re.DOTALL)
    package = "\n".join(path.read_text() for path in (REPOSITORY / "ckptman").rglob("*.py"))
    for item in re.split(r"\n\s*\n|\n(?=\d+\. |\| |- )", text):
        words = re.findall(r"`([^`\n]+)`", item)
        folders, code = [REPOSITORY / "ckptman", REPOSITORY], ""
        for path in (each for each in words if re.fullmatch(r"\w[\w/-]*/|[\w/-]+\.py", each) and "NAME" not in each):
            place = next((folder / path for folder in folders if (folder / path).exists()), None)
            assert place is not None, f"{guide} names {path}, which does not exist: {item}"
            folders = [REPOSITORY / "ckptman", REPOSITORY, place if place.is_dir() else place.parent]
            code += place.read_text() if place.is_file() else ""
        for name in (each for each in words if re.fullmatch(r"[\w.]+\(\)", each)):
            for part in name.removesuffix("()").split("."):
                found = re.search(rf"^\s*(?:class|def) {part}\b", code, re.MULTILINE)
                assert found, f"{guide} names {name}, which is in none of the modules beside it: {item}"
        for name in (each for each in words if re.fullmatch(r"[A-Z]\w*[a-z]\w*", each)):
            known = name in CLASSES_OF_OTHERS or re.search(rf"^class {name}\b", package, re.MULTILINE)
            assert known, f"{guide} names {name}, which is not a class of the package: {item}"


def without_code(page):
    return re.sub(r"```.*?```|`[^`\n]*`", "", text_of(page), flags=re.DOTALL)


def anchors(page):
    """What the headings of a page can be linked by."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}

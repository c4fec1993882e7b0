"""What scripts and cron jobs hold on to: verbs, options, exit codes of misuse, and that looking costs no torch."""

import os
import re
import subprocess
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import pytest
import typer

from ckptman import __version__
from ckptman.cli.app import _VERBS, make_app
from tests.cli.test_json import GOLDEN
from tests.helpers.checkpoints import commit
from tests.helpers.fake_slurm import FakeSlurm
from tests.helpers.journals import make_root
from tests.helpers.node_memory import nodes_with
from tests.tools.monitoring.invented_run import invented

VERBS = GOLDEN["verbs and options"]


def test_verbs_and_options_are_those_that_users_hold():
    verbs = dict(typer.main.get_command(make_app()).commands)
    for group in ("chain", "memory", "probe"):
        verbs |= {f"{group} {name}": verb for name, verb in verbs.pop(group).commands.items()}
    found = {
        name: [
            each.opts[0] if each.param_type_name == "option" else (each.metavar or each.name)
            for each in verb.params
            if each.name != "help"
        ]
        for name, verb in verbs.items()
    }
    assert found == VERBS


def test_every_verb_explains_itself(ends):
    for verb in VERBS:
        assert f"Usage: ckptman {verb}" in ends(0, *verb.split(), "--help").out


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_help_fits_the_terminal_and_is_whole(columns, ends, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    for arguments in ([], *(verb.split() for verb in VERBS), ["chain"], ["memory"]):
        told = ends(0, *arguments, "--help").out
        assert max(map(len, told.splitlines())) <= columns
        assert not re.search(r"[a-z]\.\.\.$", told, re.MULTILINE)


def test_help_groups_the_verbs_and_imports_none_of_them(ends):
    told = ends(0, "--help").out
    assert re.findall(r"^(\w+):$", told, re.MULTILINE) == ["Look", "Prove", "Keep", "Move", "Plan", "Run", "Options"]
    assert re.findall(r"^  ([a-z]+) ", told, re.MULTILINE) == list(_VERBS)
    listed = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ckptman", "--help"], capture_output=True, text=True, timeout=240
    )
    assert not re.findall(r"ckptman\.(?:catalog|cli\.list)\b|\btorch\b|\brich\b", listed.stderr)


COMPLETIONS = [
    ("ckptman pru", ["prune"]),
    ("ckptman chain re", ["resume"]),
    ("ckptman prune --lef", ["--leftovers"]),
    ("ckptman prune run --keep-m", ["--keep-monthly"]),
    ("ckptman --vers", ["--version"]),
]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(("typed", "found"), COMPLETIONS)
def test_a_shell_is_told_what_may_follow(shell, typed, found, ends, monkeypatch):
    monkeypatch.setenv("_CKPTMAN_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    monkeypatch.setenv("COLUMNS", "80")
    if shell == "bash":
        monkeypatch.setenv("COMP_WORDS", typed)
        monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    else:
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", typed)
    told = ends(0).out.strip()
    assert re.findall(r'\(\("([^"]+)"' if shell == "zsh" else r"(?m)^(\S+)", told) == found


def test_completion_works_in_bash(tmp_path):
    command = tmp_path / "ckptman"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m ckptman "$@"\n')
    command.chmod(0o755)
    typed = """
        eval "$(ckptman --show-completion)"
        COMP_WORDS=(ckptman prune --lef); COMP_CWORD=2
        $(complete -p ckptman | sed 's/.*-F \\([^ ]*\\).*/\\1/') ckptman
        echo "${COMPREPLY[@]}"
    """
    ran = subprocess.run(
        ["bash", "--norc", "-c", typed],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.stdout == "--leftovers\n", ran.stderr


def test_version_is_that_of_the_package(ends):
    assert ends(0, "--version").out == f"ckptman {__version__}\n"


WITHOUT_TORCH = """
import sys
from ckptman.cli.app import main
codes = [main(command.split()) for command in sys.argv[1:]]
print(codes, sorted({"torch", "numpy", "rich", "pandas"} & set(sys.modules)), file=sys.stderr)
"""
LIGHT = [
    *("--version", "list root", "path root --best loss", "memory list --path .", "prune root --keep-last 1 --dry-run"),
    *("submit --scheduler local --chain-dir chain -- true", "status root --no-slurm", "report root --no-slurm"),
    *("plan --params 7B --memory --json", "simulate --mtbf 5h --runs 2 --memory --json"),
    *("doctor --timeout 60 --json", "doctor root --size 1MiB", "template lumi"),
]
WITH_NUMPY = [
    *("show root", "verify root --all", "copy root copy", "memory flush root --path shm"),
    "report root --no-slurm --html page.html",
]
"""The chunk table, which tells where tensors lie, is an array."""


@pytest.mark.parametrize(("commands", "loaded"), [(LIGHT, []), (WITH_NUMPY, ["numpy"])], ids=["light", "with NumPy"])
def test_looking_needs_no_torch_and_no_rich(commands, loaded, tmp_path):
    run = invented(5)
    make_root(tmp_path / "root", run.events, [1])
    commit(tmp_path / "root", 2, metrics={"loss": 1.0})
    nodes_with(tmp_path, 120, {"a": range(4)})
    environ = {**os.environ, "SLURMD_NODENAME": "a", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", WITHOUT_TORCH, *commands]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path, env=environ)
    assert ran.stderr.splitlines()[-1] == f"{[0] * len(commands)} {loaded}", ran.stderr


def test_the_table_of_the_docs_is_that_of_the_help():
    page = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")
    assert re.findall(r"(?m)^\| \[`ckptman (\w+)`\]\(#ckptman-\1\) \| (.*) \| [\d, ]+ \|$", page) == [
        (verb, does) for verb, (_, _, does) in _VERBS.items()
    ]


# As it is installed beside a container: `site` begins every Python with it.
REFUSES_TORCH = """
import sys

class Refusal:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy"):
            raise ModuleNotFoundError(f"there is no {name}", name=name)

sys.meta_path.insert(0, Refusal())
"""


def test_a_chain_is_submitted_run_and_shown_without_torch(tmp_path):
    fake = FakeSlurm(tmp_path / "bin")
    fake.plan("sbatch", (0, "101", ""), (0, "102", ""))
    (tmp_path / "sitecustomize.py").write_text(REFUSES_TORCH)
    environ = {**os.environ, **fake.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"}

    def done(*words, **others):
        ran = subprocess.run(
            words, capture_output=True, text=True, timeout=240, cwd=tmp_path, env={**environ, **others}
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    refused = done(sys.executable, "-c", "try:\n import torch\nexcept ImportError as error: print(error)")
    assert refused == "there is no torch\n"
    ckptman = (sys.executable, "-m", "ckptman")
    done(*ckptman, "template", "lumi", "-o", "train.sbatch", "--set", "container=", "--set", "command=true")
    done(*ckptman, "template", "--list")
    (tmp_path / "short.sbatch").write_text("#!/bin/bash\n#SBATCH --time=5\necho trained\n")
    assert "would submit" in done(*ckptman, "submit", "--dry-run", "train.sbatch")
    done(*ckptman, "submit", "--chain-dir", "chain", "short.sbatch")
    [script] = [each[-2] for each in fake.argv("sbatch")]
    assert "trained" in done("bash", script, "1", SLURM_JOB_ID="101", SLURM_JOB_NODELIST="n1")
    assert "finished" in done(*ckptman, "chain", "show", "chain")
    done(*ckptman, "chain", "list")


def test_the_page_lists_all_dependencies_but_torch():
    repository = Path(__file__).parents[2]
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    wanted = {re.match(r"[\w-]+", each)[0] for each in project["dependencies"]} - {"torch"}
    page = (repository / "docs/slurm.md").read_text()
    [listed] = re.findall(r"^pip install (.*) && pip install --no-deps \.$", page, re.MULTILINE)
    assert set(listed.split()) == wanted

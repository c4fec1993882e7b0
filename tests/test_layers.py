"""What the contracts of import-linter (`make check`) cannot see: calls, private names, and what an import loads."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ckptman

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = Path(ckptman.__file__).parent
PURE_FOLDERS = ("policies", "forecast")
PURE_MODULES = {
    *("__future__", "abc", "bisect", "collections", "dataclasses", "datetime", "enum", "functools", "itertools"),
    *("math", "numbers", "operator", "statistics", "typing", "ckptman"),  # of ckptman: see the contracts
}
IMPURE_CALLS = {
    *("open", "print", "input", "eval", "exec", "__import__", "import_module"),
    *("now", "today", "utcnow", "fromtimestamp", "astimezone"),
}
FILE_CALLS = {
    *("fsync", "fdatasync", "syncfs", "rename", "renames", "rmtree", "move", "link", "hardlink_to", "unlink", "rmdir"),
    *("removedirs", "copytree"),
}


def impurities(where, tree):
    """What a decision imports or calls that could look at a disk, a clock or a process."""
    if where.split("/")[0] not in PURE_FOLDERS:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] not in PURE_MODULES)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module.split(".")[0] not in PURE_MODULES:
            yield node.module
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in IMPURE_CALLS:
            yield ast.unparse(node.func)


def private_names_of_torch(where, tree):
    """Private names of torch, and private modules of it, outside of the one place for them."""
    if where == "_torch_compat.py":
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            names = [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
        yield from (name for name in names if re.match(r"(?:torch|dist)\.(?:\w+\.)*_[a-zA-Z]", name))


def durable_calls_elsewhere(where, tree):
    """Calls that flush, rename or remove files outside of `durable_files.py`, unless they are made on `DISK`."""
    if where == "storage/io/durable_files.py":
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "shutil", "pathlib"):
            yield from {alias.name for alias in node.names} & {*FILE_CALLS, "replace", "remove"}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) != "DISK":
            of_os = ast.unparse(node.value) in ("os", "shutil")
            if node.attr in FILE_CALLS or (node.attr in ("replace", "remove") and of_os):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and _is_replace_of_a_path(node):
            yield ast.unparse(node.func)


def _is_replace_of_a_path(call):
    """`path.replace(target)` has one argument, `text.replace(old, new)` two, `dataclasses.replace` keywords."""
    is_replace = isinstance(call.func, ast.Attribute) and call.func.attr == "replace"
    return is_replace and len(call.args) == 1 and not call.keywords


def names_from_the_top(where, tree):
    """What a module takes from `ckptman` itself, which lends out names of all floors."""
    if where.startswith(("__init__.py", "train/")):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "ckptman":
            yield from (alias.name for alias in node.names if alias.name in ckptman._HOME)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "ckptman" and node.attr in ckptman._HOME:
            yield node.attr


RULES = (impurities, private_names_of_torch, durable_calls_elsewhere, names_from_the_top)


@pytest.mark.parametrize("rule", RULES)
def test_the_package_keeps(rule):
    for path in PACKAGE.rglob("*.py"):
        where = path.relative_to(PACKAGE).as_posix()
        assert list(rule(where, ast.parse(path.read_text()))) == [], where


@pytest.mark.parametrize(
    ("rule", "where", "text", "broken_by"),
    [
        (impurities, "policies/x.py", "import time", "time"),
        (impurities, "policies/x.py", "def f():\n    from os import environ", "os"),
        (impurities, "forecast/x.py", "f = open('x')", "open"),
        (impurities, "policies/x.py", "datetime.now()", "datetime.now"),
        (
            private_names_of_torch,
            "saving/x.py",
            "from torch.distributed._shard import api",
            "torch.distributed._shard.api",
        ),
        (private_names_of_torch, "saving/x.py", "import torch\ntorch._C", "torch._C"),
        (durable_calls_elsewhere, "io/x.py", "import os\nos.fsync(3)", "os.fsync"),
        (durable_calls_elsewhere, "train/x.py", "path.replace(target)", "path.replace"),
        (durable_calls_elsewhere, "cli/x.py", "from shutil import rmtree", "rmtree"),
        (durable_calls_elsewhere, "cli/x.py", "import os\nremove = os.remove", "os.remove"),
        (names_from_the_top, "io/x.py", "from ckptman import Checkpointer", "Checkpointer"),
        (names_from_the_top, "io/x.py", "import ckptman\nckptman.Checkpointer", "Checkpointer"),
        (durable_calls_elsewhere, "io/x.py", "DISK.rename(a, b)\nDISK.unlink(c)\n'a'.replace('a', 'b')", None),
        (impurities, "policies/x.py", "from collections.abc import Mapping\nfrom ckptman.errors import X", None),
    ],
)
def test_each_rule_can_be_broken(rule, where, text, broken_by):
    assert list(rule(where, ast.parse(text))) == ([broken_by] if broken_by else [])


def loaded_after(code):
    """The modules that a fresh interpreter has loaded after this code."""
    code += "\nimport sys\nprint(*sys.modules)"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()


def test_the_package_loads_its_parts_when_they_are_asked_for():
    assert [name for name in loaded_after("import ckptman") if name.startswith("ckptman.")] == []


def test_what_needs_no_torch_does_not_load_it():
    contracts = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (floors,) = (each["source_modules"] for each in contracts if each.get("forbidden_modules") == ["torch"])
    folders = tuple(f"{floor}." for floor in floors)
    modules = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    modules = {name.removesuffix(".__init__") for name in modules if f"{name}.".startswith(folders)}
    names = [f"ckptman.{name}" for name, home in ckptman._HOME.items() if home in modules]
    loaded = loaded_after("\n".join(["import ckptman", *(f"import {name}" for name in sorted(modules)), *names]))
    assert {*modules} <= {*loaded}
    assert "torch" not in loaded

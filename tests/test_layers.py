"""The rooms hold: who may import whom, what is pure, what knows torch, and where files become durable.

Each rule is a function from a source tree to the list of what breaks it. It is run on the package, and on a small tree
that breaks it, so that a rule that can never fire is noticed.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ckptman

PACKAGE = Path(ckptman.__file__).parent
ORDER = (
    *("errors", "policies", "forecast", "io", "format", "catalog", "integrity", "transfer", "runtime", "health"),
    *(
        "scheduler",
        "run",
        "monitoring",
        "doctor",
        "_torch_compat",
        "state",
        "data",
        "comm",
        "loading",
        "saving",
        "session",
        "verify",
        "diff",
        "exporting",
        "dcp",
        "api",
    ),
    *("checkpointer", "integrations", "train", "cli"),
)
"""The rooms. Imports go only to the left."""
ABOVE_ALL = ("__init__", "__main__", "_moved")
"""Modules beside the rooms: names for users, what they were called before, and `python -m ckptman`."""
TORCH_ROOMS = ORDER[ORDER.index("_torch_compat") : ORDER.index("cli")]
PURE_ROOMS = ("policies", "forecast")
MOST_FILES = 14
"""In a folder, but for that of the verbs."""
PURE = {
    *("__future__", "abc", "bisect", "collections", "collections.abc", "dataclasses", "datetime", "enum", "functools"),
    *("itertools", "math", "numbers", "operator", "statistics", "typing"),
}
"""All that pure rooms may import besides errors and each other: nothing that sees a disk, a clock or a process."""
IMPURE_CALLS = {
    *("open", "print", "input", "eval", "exec", "__import__", "import_module"),
    *("now", "today", "utcnow", "fromtimestamp", "astimezone"),
}
"""The second line: what of `datetime` looks at the clock, or at the time zone of this machine."""
DURABLE = "io/durable_files.py"
COMPAT = "_torch_compat.py"
FILE_CALLS = {
    *("fsync", "fdatasync", "syncfs", "rename", "renames", "rmtree", "move", "link", "hardlink_to", "unlink", "rmdir"),
    *("removedirs", "copytree"),
}
FORBIDDEN_FOLDERS = {"torch", "dist", "build"}

HOMES = ckptman._HOME


def sources(package):
    """Every module of a package: its path below the package, and its syntax tree."""
    for path in sorted(package.rglob("*.py")):
        yield path.relative_to(package).as_posix(), ast.parse(path.read_text(), str(path))


def layer_of(module):
    """The room of `ckptman.format.paths`: format. Names that the package lends out count as their home."""
    parts = module.split(".")
    if len(parts) == 1:
        return "__init__"
    home = HOMES.get(parts[1])
    return home.split(".")[1] if home else parts[1]


def imports(tree, package_parts):
    """Line and full name of everything a module imports, at its top or inside functions, relative imports resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package_parts[: len(package_parts) + 1 - node.level] if node.level else []
            prefix = ".".join([*base, node.module] if node.module else base)
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)
        # `import ckptman` is allowed anywhere, for its version; what it lends out is an import.
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "ckptman" and node.attr in HOMES:
            yield node.lineno, f"ckptman.{node.attr}"


def upward_imports(package):
    """Imports to a layer that is not left of the importing one, and modules that belong to no layer."""
    found = []
    for where, tree in sources(package):
        layer = where.split("/")[0].removesuffix(".py")
        if layer in ABOVE_ALL:
            continue
        if layer not in ORDER:
            found.append(f"{where} belongs to no layer")
            continue
        for line, name in imports(tree, ["ckptman", *where.split("/")[:-1]]):
            if name.split(".")[0] != "ckptman":
                continue
            target = layer_of(name)
            if target not in (*ORDER[: ORDER.index(layer) + 1], "__init__", "__version__"):
                found.append(f"{where}:{line} imports {name}")
    return found


def eager_root_imports(package):
    """What `ckptman/__init__.py` imports of the package for more than the type checker, besides the names of before."""
    tree = ast.parse((package / "__init__.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    found = [each for each in imports(tree, ["ckptman"]) if "ckptman" in each[1] and each[1] != "ckptman._moved"]
    return [f"__init__.py:{line} imports {name}" for line, name in found]


def impurities(package):
    """What policies import or call that could look at the world."""
    found = []
    for where, tree in sources(package):
        room = where.split("/")[0]
        if room not in PURE_ROOMS:
            continue
        for line, name in imports(tree, ["ckptman", room]):
            allowed = name in PURE or name.rpartition(".")[0] in PURE
            if not allowed and layer_of(name) not in ("errors", *PURE_ROOMS):
                found.append(f"{where}:{line} imports {name}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _called(node) in IMPURE_CALLS:
                found.append(f"{where}:{node.lineno} calls {_called(node)}")
    return found


def torch_below(package):
    """Imports of torch outside of the layers that may know it."""
    return [
        f"{where}:{line} imports {name}"
        for where, tree in sources(package)
        if where.split("/")[0].removesuffix(".py") not in TORCH_ROOMS
        for line, name in imports(tree, ["ckptman", *where.split("/")[:-1]])
        if name.split(".")[0] in ("torch", "torchvision", "torchao")
    ]


def private_names_of_torch(package):
    """Imports of private names of torch, or from private modules of it, outside of the one place for them."""
    found = []
    for where, tree in sources(package):
        if where == COMPAT:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            else:
                continue
            private = [name for name in names if re.match(r"(?:torch|dist)\.(?:\w+\.)*_[a-zA-Z]", name)]
            found += [f"{where}:{node.lineno} uses {name}" for name in private]
    return found


def durable_calls_elsewhere(package):
    """Calls that flush, rename or remove files outside of `io/durable_files.py`, unless they are made on a `Disk`."""
    found = []
    for where, tree in sources(package):
        if where == DURABLE:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in ("os", "shutil", "pathlib"):
                names = {alias.name for alias in node.names} & {*FILE_CALLS, "replace", "remove"}
                found += [f"{where}:{node.lineno} imports {name}" for name in sorted(names)]
            elif isinstance(node, ast.Attribute) and not _is_disk(node.value) and _touches_files(node, tree):
                found.append(f"{where}:{node.lineno} uses {node.attr}")
    return found


def crowded_folders(package):
    """Folders with more files than somebody takes in at a look."""
    found = []
    for folder in sorted({path.parent for path in package.rglob("*.py")}):
        count = len(list(folder.glob("*.py")))
        if count > MOST_FILES and folder.name != "cli":
            found.append(f"{folder.relative_to(package)} has {count} files")
    return found


def forbidden_folders(top):
    """Folders with a name that would hide a package, or that tools throw away."""
    return [str(path) for path in sorted(top.rglob("*")) if path.is_dir() and path.name in FORBIDDEN_FOLDERS]


def _called(call):
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def _is_disk(node):
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return name.strip("_").lower() == "disk"


def _touches_files(node, tree):
    of_os = isinstance(node.value, ast.Name) and node.value.id in ("os", "shutil")
    if node.attr in FILE_CALLS:
        return True
    if node.attr in ("replace", "remove") and of_os:
        return True
    # `path.replace(target)` has one argument, `text.replace(old, new)` has two, `dataclasses.replace` has keywords.
    return node.attr == "replace" and any(
        isinstance(call, ast.Call) and call.func is node and len(call.args) == 1 and not call.keywords
        for call in ast.walk(tree)
    )


RULES = {
    "upward imports": upward_imports,
    "eager root imports": eager_root_imports,
    "impurities": impurities,
    "torch below": torch_below,
    "durable calls elsewhere": durable_calls_elsewhere,
    "private names of torch": private_names_of_torch,
    "crowded folders": crowded_folders,
    "forbidden folders": forbidden_folders,
}


@pytest.mark.parametrize("name", RULES)
def test_the_package_keeps(name):
    assert RULES[name](PACKAGE) == []


def test_no_folder_of_the_project_hides_a_package():
    project = PACKAGE.parent
    for top in ("tests", "examples", "benchmarks", "docs", "slurm_templates"):
        assert forbidden_folders(project / top) == []


@pytest.mark.parametrize(
    ("rule", "where", "text", "complaint"),
    [
        ("upward imports", "policies/x.py", "from ckptman.format.paths import DOT", "policies/x.py:1"),
        ("upward imports", "errors.py", "import ckptman.policies.save_policies", "errors.py:1"),
        ("upward imports", "io/x.py", "def f():\n    from ckptman.runtime import signals", "io/x.py:2"),
        ("upward imports", "io/x.py", "from ..comm import control_group", "ckptman.comm.control_group"),
        ("upward imports", "io/x.py", "from .. import train", "ckptman.train"),
        ("upward imports", "saving/x.py", "from ckptman import cli", "ckptman.cli"),
        ("upward imports", "runtime/x.py", "from ckptman import Checkpointer", "ckptman.Checkpointer"),
        ("upward imports", "runtime/x.py", "import ckptman\nckptman.Checkpointer", "x.py:2"),
        ("upward imports", "util/x.py", "", "belongs to no layer"),
        ("eager root imports", "__init__.py", "from ckptman.errors import CkptmanError", "__init__.py:1"),
        ("eager root imports", "__init__.py", "from . import errors", "__init__.py:1"),
        ("impurities", "policies/x.py", "import time", "imports time"),
        ("impurities", "policies/x.py", "def f():\n    from os import environ", "imports os.environ"),
        ("impurities", "policies/x.py", "from pathlib import Path", "imports pathlib"),
        ("impurities", "policies/x.py", "import torch", "imports torch"),
        ("impurities", "policies/x.py", "f = open('x')", "calls open"),
        ("torch below", "io/x.py", "def f():\n    import torch.distributed as dist", "io/x.py:2"),
        ("torch below", "cli/x.py", "from torch import nn", "cli/x.py:1"),
        ("durable calls elsewhere", "io/x.py", "import os\nos.fsync(3)", "uses fsync"),
        ("durable calls elsewhere", "train/x.py", "import os\nos.replace('a', 'b')", "uses replace"),
        ("durable calls elsewhere", "train/x.py", "path.replace(target)", "uses replace"),
        ("durable calls elsewhere", "train/x.py", "path.rename(target)", "uses rename"),
        ("durable calls elsewhere", "cli/x.py", "import shutil\nshutil.rmtree('a')", "uses rmtree"),
        ("durable calls elsewhere", "cli/x.py", "from shutil import rmtree", "imports rmtree"),
        ("durable calls elsewhere", "cli/x.py", "import os\nremove = os.remove", "uses remove"),
        ("durable calls elsewhere", "cli/x.py", "path.unlink()", "uses unlink"),
        ("private names of torch", "saving/x.py", "from torch.distributed._shard import api", "uses torch"),
        ("private names of torch", "saving/x.py", "from torch.distributed.tensor import _utils", "uses torch"),
        ("private names of torch", "saving/x.py", "import torch\ntorch._C.x()", "x.py:2"),
        ("forbidden folders", "train/dist/x.py", "", "dist"),
        ("forbidden folders", "torch/x.py", "", "torch"),
        ("forbidden folders", "io/build/x.py", "", "build"),
    ],
)
def test_each_rule_can_be_broken(tmp_path, rule, where, text, complaint):
    path = tmp_path / where
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert any(complaint in line for line in RULES[rule](tmp_path)), RULES[rule](tmp_path)


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("saving/x.py", "import ckptman\nimport torch\nfrom ckptman.format import paths\nckptman.__version__"),
        ("policies/x.py", "from collections.abc import Mapping\nfrom ckptman.errors import CkptmanError"),
        ("io/x.py", "self._disk.rename(a, b)\nDISK.remove_tree(c)\n'a'.replace('a', 'b')\nreplace(x, y=1)"),
        ("cli/x.py", "from ckptman import Checkpointer"),
        ("__init__.py", "if TYPE_CHECKING:\n    from ckptman.errors import CkptmanError"),
    ],
)
def test_what_is_allowed(tmp_path, where, text):
    path = tmp_path / where
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    (tmp_path / "__init__.py").touch()
    assert [line for rule in RULES.values() for line in rule(tmp_path)] == []


def torch_free_modules():
    """Every module that must load without torch: all but those of the rooms that may know it."""
    names = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        if parts[0] not in TORCH_ROOMS and parts != ["__main__"]:
            names.append(".".join(["ckptman", *parts]).removesuffix(".__init__"))
    return names


def loads_torch(modules):
    """Whether a fresh interpreter that imports these modules has torch loaded."""
    lines = [*(f"import {name}" for name in modules), "import sys", "print('torch' in sys.modules)"]
    command = [sys.executable, "-c", "\n".join(lines)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip() == "True"


def test_nothing_outside_the_rooms_of_torch_loads_it():
    modules = torch_free_modules()
    assert {"ckptman", "ckptman.cli", "ckptman.catalog.catalog", "ckptman.scheduler.chain"} <= set(modules)
    assert not loads_torch(modules)


def test_the_public_names_of_torch_free_layers_load_no_torch():
    names = [f"ckptman.{name}" for name, home in HOMES.items() if home.split(".")[1] not in TORCH_ROOMS]
    assert not loads_torch(["ckptman\n" + "\n".join(names)])
    assert loads_torch(["sys\nsys.modules['torch'] = sys"]), "the check must be able to see torch"

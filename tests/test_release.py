"""What would be published: an sdist, a wheel that is built from it, and what they say of themselves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import ckptman
from ckptman.jobs.slurm.templates import render_template

REPOSITORY = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Release:
    source: Path
    """The sdist, unpacked."""
    sdist: Path
    wheel: Path


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    pytest.importorskip("hatchling")
    pytest.importorskip("hatch_fancy_pypi_readme")
    folder = tmp_path_factory.mktemp("release")
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(folder), "-t"]
    subprocess.run([*build, "sdist"], cwd=REPOSITORY, check=True, capture_output=True, timeout=240)
    [sdist] = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "source", filter="data")
    [source] = (folder / "source").iterdir()
    subprocess.run([*build, "wheel"], cwd=source, check=True, capture_output=True, timeout=240)
    [wheel] = folder.glob("*.whl")
    return Release(source, sdist, wheel)


def test_the_wheel_holds_the_package_alone_and_the_sdist_what_tests_read(release):
    with zipfile.ZipFile(release.wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names} == {"ckptman", f"ckptman-{ckptman.__version__}.dist-info"}
    modules = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "ckptman").rglob("*.py")}
    assert modules | {"ckptman/py.typed"} <= set(names)
    assert len(list((release.source / "tests").rglob("test_*.py"))) == len(
        list((REPOSITORY / "tests").rglob("test_*.py"))
    )
    for name in ("Makefile", "constraints.txt", "README.md", "CONTRIBUTING.md", "docs/conf.py", "slurm_templates"):
        assert (release.source / name).exists(), name


def test_an_installed_ckptman_has_the_templates(release, tmp_path):
    with zipfile.ZipFile(release.wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = "import sys; from ckptman.cli.app import main; sys.exit(main(['template', 'lumi']))"
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    shown = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, check=True, capture_output=True)
    assert shown.stdout.decode() == render_template("lumi", {})


def test_what_an_index_is_told(release):
    from packaging.metadata import Metadata

    with zipfile.ZipFile(release.wheel) as archive:
        [name] = [each for each in archive.namelist() if each.endswith("/METADATA")]
        told = Metadata.from_email(archive.read(name), validate=True)
    assert str(told.version) == ckptman.__version__
    assert told.requires_dist
    assert not [each for each in told.requires_dist if each.url]
    assert told.description_content_type == "text/markdown"
    assert told.description
    readme = (REPOSITORY / "README.md").read_text()
    code = re.compile(r"```.*?```", re.DOTALL)
    assert code.findall(told.description) == code.findall(readme)
    links = re.findall(r"\]\(([^)]+)\)", code.sub("", told.description))
    assert not [each for each in links if not each.startswith("https://")]


def test_all_files_agree_on_the_version():
    version = re.escape(ckptman.__version__)
    assert re.search(rf"^version: {version}$", (REPOSITORY / "CITATION.cff").read_text(), re.MULTILINE)
    [newest, *_] = re.findall(r"^## (\S+)", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest == ckptman.__version__


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_a_clean_environment_passes_the_demo(release, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--constraint", REPOSITORY / "constraints.txt"]
    subprocess.run([*install, f"{release.sdist}[train]"], check=True, timeout=1200)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run(
        [python, release.source / "examples" / "demo.py", "--steps", "48"],
        cwd=tmp_path,
        env=env | {"OMP_NUM_THREADS": "1"},
        check=True,
        timeout=500,
    )

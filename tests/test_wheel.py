"""The wheel contains all modules, templates and data of the folders. Each upper bound of a dependency has a reason."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

FOLDERS = {"hyperpod_ext": "hyperpod_ext", "cli": "hyperpod_ext/cli", "templates": "hyperpod_ext/templates"}
"""Folder of the repository, and the package it installs as."""

SHIPPED = {".py", ".j2", ".json", ".yaml", ".typed"}
BUILT = "hyperpod_ext/runtime/snapshot/_stream.abi3.so"
"""Compiled from stream.c, if a compiler is installed."""

BOUND = re.compile(r"(?:<=?|==|~=)[^,;]+")
REQUIREMENT = re.compile(r'^ {4}"([^"]+)",(?: *# *(.*))?$', re.MULTILINE)


def wanted_files(root: Path) -> set[str]:
    return {
        f"{package}/{file.relative_to(root / folder)}"
        for folder, package in FOLDERS.items()
        for file in (root / folder).rglob("*")
        if file.suffix in SHIPPED or file.name == "py.typed"
    }


def test_every_folder_with_modules_is_a_package_of_the_wheel(root: Path) -> None:
    found = runpy.run_path(str(root / "setup.py"), run_name="not built")["packages"](root)
    folders = {str(Path(file).parent).replace("/", ".") for file in wanted_files(root) if file.endswith(".py")}
    assert found == sorted(folders)


def unexplained_bounds(text: str) -> list[str]:
    """Requirements with an upper bound whose line has no comment `<bound>: reason`."""
    return [
        requirement
        for requirement, comment in REQUIREMENT.findall(text)
        for bound in BOUND.findall(requirement)
        if not re.match(rf"{re.escape(bound)}: \w", comment)
    ]


def test_each_upper_bound_has_a_reason(root: Path) -> None:
    text = (root / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    extras = [one for extra in project["optional-dependencies"].values() for one in extra]
    read = [requirement for requirement, _ in REQUIREMENT.findall(text)]
    assert {*project["dependencies"], *extras} <= {*read}
    assert unexplained_bounds(text) == []


@pytest.mark.parametrize(
    "line", ['"a>=1,<2",', '"a==1.*",  # of the CDK', '"a~=1.2",  # ==1.2: pinned', '"a<=2",  # <=2:']
)
def test_a_bound_without_a_reason_is_found(line: str) -> None:
    assert len(unexplained_bounds(f'    "b>=1",\n    {line}\n')) == 1
    assert unexplained_bounds('    "a>=1,<2",  # <2: of another shape\n') == []


@pytest.mark.slow
def test_the_wheel_has_every_module_and_template_and_nothing_else(root: Path, tmp_path: Path) -> None:
    # from a copy: a build writes an egg-info next to the sources, and parallel tests would read it half written
    sources = tmp_path / "sources"
    for folder in FOLDERS:
        shutil.copytree(root / folder, sources / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(root / file, sources)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(sources)]
    built = subprocess.run(build, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        shipped = {name for name in opened.namelist() if ".dist-info/" not in name}
    assert shipped - {BUILT} == wanted_files(root)
    assert (BUILT in shipped) == (shutil.which("cc") is not None)
    assert "-cp311-abi3-" in wheel.name  # for Python 3.11 and later


def test_an_editable_install_finds_its_parts_and_leaks_no_folder(tmp_path: Path) -> None:
    code = """
import importlib.util, hyperpod_ext.cli, hyperpod_ext.templates
from jinja2 import PackageLoader
assert "local/node.sh.j2" in PackageLoader("hyperpod_ext.templates", "").list_templates()
for leaked in ("cli", "templates", "tests", "examples"):
    assert importlib.util.find_spec(leaked) is None, leaked
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)

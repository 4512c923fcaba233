"""What is released is what is in the folders: the wheel is built by way of the sdist, as a release is."""

from __future__ import annotations

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
"""Of stream.c, where there is a compiler."""


def wanted_files(root: Path) -> set[str]:
    return {
        f"{package}/{file.relative_to(root / folder)}"
        for folder, package in FOLDERS.items()
        for file in (root / folder).rglob("*")
        if file.suffix in SHIPPED or file.name == "py.typed"
    }


def test_every_folder_with_modules_is_a_package_of_the_wheel(root: Path) -> None:
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    listed = settings["tool"]["setuptools"]["packages"]
    folders = {str(Path(file).parent).replace("/", ".") for file in wanted_files(root) if file.endswith(".py")}
    assert listed == sorted(set(listed))
    assert folders - set(listed) == set()


@pytest.mark.slow
def test_the_wheel_has_every_module_and_template_and_nothing_else(root: Path, tmp_path: Path) -> None:
    # of a copy: a build writes an egg-info beside the sources, where others who look for hp-ext find it half written
    sources = tmp_path / "sources"
    for folder in FOLDERS:
        shutil.copytree(root / folder, sources / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / file, sources)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(sources)]
    built = subprocess.run(build, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        shipped = {name for name in opened.namelist() if ".dist-info/" not in name}
    assert shipped - {BUILT} == wanted_files(root)
    assert (BUILT in shipped) == (shutil.which("cc") is not None)
    assert "-cp311-abi3-" in wheel.name  # one for this version of Python and all later ones


def test_an_editable_install_finds_its_parts_and_leaks_no_folder(tmp_path: Path) -> None:
    code = """
import importlib.util, hyperpod_ext.cli, hyperpod_ext.templates
from jinja2 import PackageLoader
assert "local/node.sh.j2" in PackageLoader("hyperpod_ext.templates", "").list_templates()
for leaked in ("cli", "templates", "tests", "examples"):
    assert importlib.util.find_spec(leaked) is None, leaked
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)

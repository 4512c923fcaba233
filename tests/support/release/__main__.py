"""Build a release from the last commit into build/release, and check it. Each step prints a line with its seconds."""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import sys
import tempfile
from pathlib import Path

import pythons

from release import built, fresh, notes, tries
from release.steps import StepFailedError, run, step

ROOT = Path(__file__).resolve().parents[3]
OUT = ROOT / "build" / "release"
PYTHONS = ("3.11", "3.12", "3.13")


def main() -> None:
    parser = argparse.ArgumentParser(prog="make release", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="keep the environments in which the wheel was tried")
    arguments = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="hpx-release-"))
    try:
        _release(scratch)
    finally:
        if arguments.keep:
            print(f"kept {scratch}")
        else:
            shutil.rmtree(scratch)


def _release(scratch: Path) -> None:
    with step("the working tree has no changes"):
        commit = built.check_tree(ROOT)
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    with step("notes from CHANGELOG.md"):
        section = notes.newest((ROOT / "CHANGELOG.md").read_text())
        (OUT / "notes.md").write_text(section.notes())
    with step("tools"):
        tools = built.install_tools(Path(sys.prefix) / "release")
    with step("build sdist and wheel"):
        made = built.build(ROOT, commit, tools, scratch, OUT)
        built.check_names(made, section.version)
    with step("twine check"):
        run(tools / "twine", "check", "--strict", made.sdist, made.wheel, cwd=OUT)
    programs = fresh.without_compilers(scratch / "programs")
    own = fresh.make(Path(sys.executable), scratch / "own", programs)
    with step("build a wheel from the sdist without a compiler"):
        _build_without_compiler(own, made, scratch / "wheels")
    for version in PYTHONS:
        python, name = pythons.find(version), f"Python {version}"
        if python is None:
            print(f"skipped           {name}: not installed", flush=True)
            continue
        with step(f"{name}: install the wheel in a fresh environment"):
            trial = fresh.make(python, scratch / version, programs)
            trial.install(made.wheel)
        tries.without_torch(trial, name, section.version)
    with step("install the wheel with [runtime], and link torch"):
        own.install(f"hyperpod-ext[runtime] @ {made.wheel.as_uri()}")
        own.link("torch")
    tries.with_torch(own, f"torch {importlib.metadata.version('torch')}")
    print(f"{OUT.relative_to(ROOT)}: {', '.join(sorted(file.name for file in OUT.iterdir()))}")
    if section.date == notes.UNRELEASED:
        print(
            f"CHANGELOG.md has no date for {section.version}: before you publish, write it, commit, and run this again"
        )


def _build_without_compiler(own: fresh.Fresh, made: built.Built, wheels: Path) -> None:
    own.run("python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, made.sdist)
    (wheel,) = wheels.glob("*.whl")
    if built.EXTENSION in built.files_of(wheel):
        raise StepFailedError(f"{wheel.name} contains {built.EXTENSION}, so a compiler was found")


if __name__ == "__main__":
    main()

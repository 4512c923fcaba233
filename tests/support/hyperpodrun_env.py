"""The real `hyperpodrun`, in an environment of its own on top of ours: `.venv/hyperpodrun`, made by the first test that
needs it (seconds). A machine that cannot install it skips those tests, and says why; under CI they fail.
"""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from pathlib import Path

import pytest
import whole_run
from venv_over_ours import UnavailableError, make_venv

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


def install() -> Path:
    """Python of the environment, which is made unless it is as the pins want it.

    Raises:
        UnavailableError: with what pip says.
    """
    python, stamp = FOLDER / "bin" / "python", FOLDER / "made.json"
    wanted = json.dumps({"pins": PINS.read_text(), "start": START, "python": sys.version})
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    make_venv(FOLDER, PINS, timeout_s=300.0)
    starter = FOLDER / "bin" / "hyperpodrun"
    starter.write_text(f"#!{python}\n{START}")
    starter.chmod(0o755)
    stamp.write_text(wanted)
    return python


@cache
def hyperpodrun() -> Path:
    """The program. Skips the test where there is none, and fails it under CI."""
    try:
        whole_run.once("hyperpodrun", lambda: str(install()))
    except UnavailableError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    return FOLDER / "bin" / "hyperpodrun"

"""AWS's client of its managed tier, in an environment of its own on top of ours: `.venv/aws-client`."""

from __future__ import annotations

import sys
from pathlib import Path

from venv_over_ours import make_venv

PINS = Path(__file__).with_name("aws-client-pins.txt")
FOLDER = Path(sys.prefix) / "aws-client"


def install() -> Path:
    """Python of the environment, which is made unless it is as the pins want it.

    Raises:
        UnavailableError: with what pip says.
    """
    python, stamp = FOLDER / "bin" / "python", FOLDER / "made"
    wanted = PINS.read_text() + sys.version
    if not stamp.exists() or stamp.read_text() != wanted:
        make_venv(FOLDER, PINS, timeout_s=300.0)
        stamp.write_text(wanted)
    return python

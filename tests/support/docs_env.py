"""The environment that builds the site of docs/, on top of ours: `.venv/docs`.

`python tests/support/docs_env.py` makes it. `make docs` then runs its MkDocs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from venv_over_ours import UnavailableError, make_venv

PINS = Path(__file__).with_name("docs-pins.txt")
FOLDER = Path(sys.prefix) / "docs"


def install() -> Path:
    """Return the Python of the environment. The environment is made if it is missing or the pins have changed.

    Raises:
        UnavailableError: pip could not install the pins; the message has pip's output.
    """
    python, stamp = FOLDER / "bin" / "python", FOLDER / "made"
    wanted = PINS.read_text() + sys.version
    if not stamp.exists() or stamp.read_text() != wanted:
        make_venv(FOLDER, PINS, timeout_s=600.0)
        stamp.write_text(wanted)
    return python


if __name__ == "__main__":
    try:
        install()
    except UnavailableError as error:
        sys.exit(str(error))

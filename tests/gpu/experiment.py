"""Runs one experiment in this process: `python experiment.py MODULE LANE RESULT PARENT`; writes its result as JSON.

`runner.py` starts it and ends it, with all that it has started. An experiment that fails prints its traceback.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path

from lane import Lane
from results import NotRunError, Result

from hyperpod_ext.processes import die_with_parent


def main(module: str, lane: Lane, file: Path) -> None:
    file.write_text(json.dumps(_run(module, lane).to_json()))


def _run(module: str, lane: Lane) -> Result:
    try:
        return Result("passed", figures=importlib.import_module(module).run(lane))
    except NotRunError as why:
        return Result("not run", str(why))
    except Exception as error:  # shown in the result, and by the traceback
        traceback.print_exc()
        return Result("failed", f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    die_with_parent(int(sys.argv[4]))
    main(sys.argv[1], Lane.from_json(sys.argv[2]), Path(sys.argv[3]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of torch may wait for ranks that are gone

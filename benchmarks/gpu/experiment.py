"""Runs one experiment in this process: `experiment.py MODULE:FUNCTION LANE RESULT PARENT`; writes its result as JSON.

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
from results import FailedError, NotRunError, Result

from hyperpod_ext.processes import die_with_parent


def main(module: str, lane: Lane, file: Path) -> None:
    file.write_text(json.dumps(_run(module, lane).to_json()))


def _run(name: str, lane: Lane) -> Result:
    module, _, function = name.partition(":")
    try:
        return Result("passed", figures=getattr(importlib.import_module(module), function or "run")(lane))
    except NotRunError as why:
        return Result("not run", str(why))
    except FailedError as error:
        return Result("failed", str(error), error.figures)
    except Exception as error:  # shown in the result, and by the traceback
        traceback.print_exc()
        return Result("failed", f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    die_with_parent(int(sys.argv[4]))
    main(sys.argv[1], Lane.from_json(sys.argv[2]), Path(sys.argv[3]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of torch may wait for ranks that are gone

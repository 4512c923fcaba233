"""First on PYTHONPATH while lines of tests are recorded: records those of Python processes that tests start."""

import os

if "PYTEST_CURRENT_TEST" in os.environ and "HPX_COVERED" in os.environ:
    from mutants.covering import record_child

    record_child()

"""Make the plan's own modules importable, as for the plan that runs as a program."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "gpu"))

"""Make the benchmarks' own modules importable, as for a benchmark that runs as a program."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "cpu"))

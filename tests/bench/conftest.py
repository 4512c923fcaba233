"""The benchmarks' own modules, importable as when a benchmark runs as a program."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

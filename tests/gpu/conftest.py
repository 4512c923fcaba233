"""The plan's own modules, importable as when it runs as a program."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

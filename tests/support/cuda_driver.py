"""A library that stands for CUDA's driver as far as telling goes whether a process has initialized it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

_SOURCE = """\
static int initialized;
int cuInit(unsigned flags) { initialized = 1; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return initialized ? 0 : 3; }
"""
ASKS = "import ctypes, os\ndriver = ctypes.CDLL(os.environ['DRIVER'])\n"
"""Source of a module that loads it, as NVML or torch do; `DRIVER` of the environment says where it is."""
INITIALIZES = ASKS + "driver.cuInit(0)\n"


def can_be_built() -> bool:
    return shutil.which("cc") is not None


def build(folder: Path) -> Path:
    source, library = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text(_SOURCE)
    subprocess.run(
        ["cc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", str(library), str(source)], check=True
    )
    return library

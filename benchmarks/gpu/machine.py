"""Describe this machine: GPU, driver, versions. `python benchmarks/gpu/machine.py` prints it as JSON.

`plan.py` starts this as a process of its own: asking torch for the GPU opens it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
IMPORTED = {
    "annotated_types": "annotated-types",
    "awscrt": "awscrt",
    "cffi": "cffi",
    "click": "click",
    "cryptography": "cryptography",
    "jinja2": "jinja2",
    "numpy": "numpy",
    "pycparser": "pycparser",
    "pydantic": "pydantic",
    "pydantic_core": "pydantic-core",
    "rich": "rich",
    "typing_extensions": "typing-extensions",
    "typing_inspection": "typing-inspection",
    "yaml": "PyYAML",
}
"""What a job of the product imports, and the name of its wheel."""
_BRINGS = {
    "pydantic": ("pydantic-core", "annotated-types", "typing-inspection", "typing-extensions"),
    "cryptography": ("cffi",),
    "cffi": ("pycparser",),
}
"""What pip downloads with a package; pydantic asks for one release of pydantic-core."""


def has_gpu() -> bool:
    """Whether the driver names one. Costs nothing where there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def missing_wheels() -> list[str]:
    missing = [wheel for module, wheel in IMPORTED.items() if importlib.util.find_spec(module) is None]
    return sorted(missing, key=str.lower)


def how_to_bring(wheels: list[str]) -> str:
    """A command for a machine with a package index, which brings what the named packages ask for, too."""
    brought = {wheel for package, others in _BRINGS.items() if package in wheels for wheel in others}
    named = [wheel for wheel in wheels if wheel not in brought]
    platforms = " ".join(f"--platform manylinux{name}_x86_64" for name in ("_2_34", "_2_28", "_2_17", "2014"))
    return (
        f"pip download --only-binary=:all: --python-version {PYTHON} --implementation cp {platforms} "
        f"-d wheels {' '.join(named)}"
    )


def describe() -> dict[str, str]:
    """Everything that the page has at its top."""
    import torch

    import hyperpod_ext
    from hyperpod_ext.runtime.process_group.nccl.versions import installed, judge, written

    on_gpu = torch.version.cuda is not None and torch.cuda.is_available()
    libraries = installed(os.environ, built_in=torch.cuda.nccl.version()[:3] if on_gpu else None)
    versions = {library.name: written(library.version) for library in libraries}
    problems = [str(found.problem) for found in judge(libraries)]
    return {
        "GPU": f"{torch.cuda.get_device_name(0)}, {torch.cuda.device_count()} of them" if on_gpu else "none",
        "driver": _driver() if on_gpu else "none",
        "CUDA": str(torch.version.cuda or "none"),
        "NCCL": versions.get("NCCL", "none"),
        "torch": str(torch.__version__),
        "hyperpod_ext": hyperpod_ext.__version__,
        "Python": platform.python_version(),
        "kernel": platform.release(),
        "cores": str(len(os.sched_getaffinity(0))),
        "known to be bad": "; ".join(problems) or "nothing",
        "missing": ", ".join(missing_wheels()) or "nothing",
    }


def _driver() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown"
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    print(json.dumps(describe()))

"""E7: the fork server refuses a module that initialized CUDA, accepts one that only asked for GPUs, and a child
forked after that can use the GPU; one forked after CUDA was initialized cannot. On CPU a small library stands for
CUDA's driver."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import cuda_driver
from lane import Lane
from results import Figure, Figures

_SERVER = ("-m", "hyperpod_ext.runtime.agent.fork_server")
_MODULES = {
    "asks": "import torch\ntorch.cuda.is_available()\n",
    "initializes": "import torch\ntorch.cuda.init()\n",
}
_MODULES_OF_FAKE = {"asks": "import torch\n" + cuda_driver.ASKS, "initializes": cuda_driver.INITIALIZES}
_FORKS = """
import os, sys, torch
if sys.argv[1] == "initialized":
    torch.cuda.init()
torch.cuda.is_available()
pid = os.fork()
if pid == 0:
    try:
        total = torch.ones(4, device=sys.argv[2]).sum().item()
    except RuntimeError as error:
        print(error, flush=True)
        os._exit(2)
    os._exit(0 if total == 4 else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
_WORKS, _REFUSED = 0, 2


def run(lane: Lane) -> Figures:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for module, source in (_MODULES_OF_FAKE if lane.fake else _MODULES).items():
            (folder / f"{module}.py").write_text(source)
        driver = str(cuda_driver.build(folder)) if lane.fake else ""
        refused = _answer(lane, folder, driver, ["asks", "initializes"])
        accepted = _answer(lane, folder, driver, ["torch", "asks"])
    assert "the import of 'initializes'" in refused, f"what initializes CUDA was not refused: {refused}"
    assert "initialized CUDA" not in accepted, accepted
    figures = {
        "refused": Figure(refused.partition(". ")[0]),
        "torch, and a module that asks for GPUs": Figure(accepted),
    }
    assert _child(lane, "not initialized") == _WORKS, "a forked child cannot use the device"
    figures["child forked before CUDA is initialized"] = Figure("works")
    if not lane.fake:
        assert _child(lane, "initialized") == _REFUSED, "a child forked after CUDA was initialized was not refused"
        figures["child forked after CUDA is initialized"] = Figure("cannot use the GPU")
    return figures


def _answer(lane: Lane, folder: Path, driver: str, modules: list[str]) -> str:
    """What an agent hears of a fork server that preloads these: `ready`, or the error."""
    ours, theirs = socket.socketpair()
    path = os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])
    process = subprocess.Popen(
        [sys.executable, *_SERVER, str(os.getpid()), str(theirs.fileno()), *modules],
        env=lane.environment(None) | {"PYTHONPATH": path, "DRIVER": driver},
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    with ours, ours.makefile() as answers:
        line = answers.readline()
    if not line:
        raise RuntimeError(f"the fork server ended with {process.wait()}")
    process.kill()
    process.wait()
    return str(json.loads(line).get("error", "ready"))


def _child(lane: Lane, state: str) -> int:
    command = [sys.executable, "-c", _FORKS, state, lane.device]
    environment = lane.environment(None) | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    return subprocess.run(command, env=environment, check=False, timeout=60 * lane.patience).returncode

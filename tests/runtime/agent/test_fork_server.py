"""A fork server whose preloaded modules open a GPU."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.agent.children import ForkServer

WITH_DEVICE = "import sys; from hyperpod_ext.runtime.agent.fork_server import main; main(sys.argv.pop(1))"
SOURCES = {
    "looks": "import os\nassert os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'] == '1'\n",
    "opens": "import os\nheld = open(os.environ['DEVICE'])\n",
    "comes_later": "raise SystemExit('it is not imported any more')\n",
}


async def ready(folder: Path, device: Path, modules: list[str]) -> float:
    """What the agent hears of a fork server that preloads these."""
    ours, theirs = socket.socketpair()
    with theirs:
        line = theirs.fileno()
        command = [sys.executable, "-c", WITH_DEVICE, str(device), str(os.getpid()), str(line), *modules]
        path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        environ = {**os.environ, "PYTHONPATH": path, "DEVICE": f"{device}-tools"}
        process = subprocess.Popen(command, env=environ, pass_fds=[line])
    reader, writer = await asyncio.open_connection(sock=ours)
    try:
        return await ForkServer(process.pid, reader, writer, {}).ready()
    finally:
        writer.close()
        await asyncio.to_thread(process.wait)


def test_a_preloaded_module_that_initializes_cuda_is_refused_by_name(tmp_path: Path):
    device = tmp_path / "nvidia-uvm"
    Path(f"{device}-tools").touch()
    for name, source in SOURCES.items():
        (tmp_path / f"{name}.py").write_text(source)
    told = re.escape(
        f"the import of 'opens', which restart.preload asks for, initialized CUDA: it opened {device}-tools."
    )
    with pytest.raises(JobFailedError, match=told) as caught:
        asyncio.run(asyncio.wait_for(ready(tmp_path, device, list(SOURCES)), 60))
    assert "Remove the module from restart.preload" in str(caught.value)

"""A fork server whose preloaded modules use CUDA."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import cuda_driver
import pytest

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.agent.children import ForkServer

SERVER = "hyperpod_ext.runtime.agent.fork_server"
SOURCES = {
    "looks": "import os\nassert os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'] == '1'\n",
    "asks": cuda_driver.ASKS,
    "initializes": cuda_driver.INITIALIZES,
    "comes_later": "raise SystemExit('it is not imported any more')\n",
}


async def ready(folder: Path, driver: Path, modules: list[str]) -> float:
    """What the agent hears of a fork server that preloads these."""
    ours, theirs = socket.socketpair()
    with theirs:
        line = theirs.fileno()
        command = [sys.executable, "-m", SERVER, str(os.getpid()), str(line), *modules]
        path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        environ = {**os.environ, "PYTHONPATH": path, "DRIVER": str(driver)}
        process = subprocess.Popen(command, env=environ, pass_fds=[line])
    reader, writer = await asyncio.open_connection(sock=ours)
    try:
        return await ForkServer(process.pid, reader, writer, {}).ready()
    finally:
        writer.close()
        await asyncio.to_thread(process.wait)


@pytest.mark.skipif(not cuda_driver.can_be_built(), reason="no cc, which builds what stands for CUDA's driver")
def test_a_preloaded_module_that_initializes_cuda_is_refused_by_name(tmp_path: Path):
    for name, source in SOURCES.items():
        (tmp_path / f"{name}.py").write_text(source)
    said = "the import of 'initializes', which restart.preload asks for, initialized CUDA."
    with pytest.raises(JobFailedError, match=re.escape(said)) as caught:
        asyncio.run(asyncio.wait_for(ready(tmp_path, cuda_driver.build(tmp_path), list(SOURCES)), 60))
    assert "Remove the module from restart.preload" in str(caught.value)

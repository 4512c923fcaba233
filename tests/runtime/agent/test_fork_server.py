"""A fork server whose preloaded modules use CUDA, start threads, or load their parts later."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import cuda_driver
import pytest

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.agent import children, fork_server
from hyperpod_ext.runtime.agent.children import ForkServer

SERVER = "hyperpod_ext.runtime.agent.fork_server"
SOURCES = {
    "looks": "import os\nassert os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'] == '1'\n",
    "asks": cuda_driver.ASKS,
    "initializes": cuda_driver.INITIALIZES,
    "comes_later": "raise SystemExit('it is not imported any more')\n",
}


async def ready(folder: Path, driver: Path, modules: list[str]) -> ForkServer:
    """A fork server that has preloaded these, in a process that was not forked from this one."""
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": path, "DRIVER": str(driver)}
    with mock.patch.dict(sys.modules):
        sys.modules.pop(SERVER)
        server = ForkServer(modules, environ)
    try:
        await server.connect({})
        await server.ready()
        return server
    finally:
        os.kill(server.pid, signal.SIGKILL)
        await asyncio.to_thread(os.waitpid, server.pid, 0)


@pytest.mark.skipif(not cuda_driver.can_be_built(), reason="no cc, which builds what stands for CUDA's driver")
def test_a_preloaded_module_that_initializes_cuda_is_refused_by_name(tmp_path: Path):
    for name, source in SOURCES.items():
        (tmp_path / f"{name}.py").write_text(source)
    said = "the import of 'initializes', which restart.preload asks for, initialized CUDA."
    with pytest.raises(JobFailedError, match=re.escape(said)) as caught:
        asyncio.run(asyncio.wait_for(ready(tmp_path, cuda_driver.build(tmp_path), list(SOURCES)), 60))
    assert "Remove the module from restart.preload" in str(caught.value)


THREADS = {
    "telemetry": "import threading as t\nt.Thread(target=t.Event().wait, name='sends', daemon=True).start()\n",
    "imports_it": "import telemetry\n",
    "low_level": "import _thread, threading\n_thread.start_new_thread(threading.Event().wait, ())\n",
    "harmless": "import threading\nended = threading.Thread(target=print)\nended.start()\nended.join()\n",
}
LAZY = """
_PARTS = {"Trainer": "lazy.trainer", "Config": "lazy.config"}
def __getattr__(name):
    if name not in _PARTS: raise AttributeError(name)
    import importlib
    return getattr(importlib.import_module(_PARTS[name]), name)
def __dir__():
    return list(_PARTS)
"""


def test_a_module_that_starts_a_thread_is_left_to_the_workers(tmp_path: Path) -> None:
    """Workers that were forked beside the thread hung at a lock that it held, and the script's line was blamed."""
    for name, source in THREADS.items():
        (tmp_path / f"{name}.py").write_text(source)
    server = asyncio.run(asyncio.wait_for(ready(tmp_path, tmp_path, list(THREADS)), 300))
    assert [re.findall("'(.*?)'", note)[0] for note in server.notes] == ["telemetry", "imports_it", "low_level"]
    assert "started the thread 'sends'" in server.notes[0]
    assert "Each worker imports the module itself." in server.notes[0]


def test_of_a_package_that_loads_later_its_parts_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lazy").mkdir()
    (tmp_path / "lazy" / "__init__.py").write_text(LAZY)
    (tmp_path / "lazy" / "trainer.py").write_text("class Trainer: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    note = fork_server.loads_later("lazy", fork_server.load("lazy"))
    assert note.startswith("lazy, which restart.preload names, loads 2 of its 2 parts when they are first used")
    assert "lazy.trainer" not in sys.modules
    trainer = fork_server.load("lazy.Trainer")
    assert fork_server.loads_later("lazy.Trainer", trainer) == ""
    assert trainer.__module__ == "lazy.trainer"
    for name in ("lazy.Nothing", "lazy.trainer.Nothing", "lazy.Config", "nothing.at.all"):
        with pytest.raises(ModuleNotFoundError):
            fork_server.load(name)
    for name in ("lazy", "lazy.trainer"):
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("name", ["torch", "numpy", "json", "torch.distributed", "hyperpod_ext.runtime"])
def test_an_ordinary_package_is_not_taken_for_a_lazy_one(name: str) -> None:
    assert fork_server.loads_later(name, fork_server.load(name)) == ""


def test_a_forked_module_keeps_the_environment_if_that_is_given_itself(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    module = ModuleType("says")
    module.__file__ = "says.py"
    module.main = lambda: kept.write_text(os.environ.get("HPX_TOLD", "lost"))  # type: ignore[attr-defined]
    with mock.patch.dict(os.environ, {"HPX_TOLD": "here"}):
        if (pid := os.fork()) == 0:
            children.become_module(module, [], os.environ)
        os.waitpid(pid, 0)
    assert kept.read_text() == "here"

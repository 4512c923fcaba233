"""An agent that somebody starts by hand, with settings and flags that are wrong."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import warm

from hyperpod_ext.config.job.runtime import ENV_RUNTIME
from hyperpod_ext.errors import ConfigError, JobFailedError
from hyperpod_ext.runtime.agent.settings import parse, read_settings


@pytest.mark.parametrize(
    ("told", "said"),
    [('{"nodes": 1, "workers_per_node": 1}', "HPX_RUNTIME: name: Field required"), ("{", "HPX_RUNTIME: Invalid JSON")],
)
def test_settings_that_cannot_be_read_are_told(
    told: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.setenv(ENV_RUNTIME, told)
    with pytest.raises(ConfigError, match=said):
        read_settings(parse(["--", str(tmp_path / "train.py")]), tmp_path, tmp_path)


@pytest.mark.parametrize("endpoint", ["localhost", "localhost:", ":29400", "localhost:http", "localhost:99999", "::1"])
def test_an_endpoint_is_host_and_port(endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--rdzv-endpoint", endpoint, "--", "train.py"])
    assert f"{endpoint} is not HOST:PORT" in capsys.readouterr().err


def test_a_job_that_fails_is_told_with_its_cause(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('no such dataset')\n")
    flags = ["--rdzv-endpoint", "127.0.0.1:0", "--", "train.py"]
    with (tmp_path / "out").open("wb") as output, (tmp_path / "errors").open("wb") as errors:
        agent = warm.start(warm.AGENT, flags, env=os.environ, log=output, errors=errors, cwd=tmp_path)
        assert agent.wait(60) == 7
    told = (tmp_path / "errors").read_text()
    assert "hyperpod_ext agent, node 0: rank 0 (node 0) at step 0: ValueError: no such dataset" in told
    assert "Traceback" not in told


def test_several_nodes_need_a_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "secret").touch(mode=0o600)
    (tmp_path / "secret").write_text("0123456789abcdef")
    monkeypatch.setenv("HPX_SECRET_FILE", str(tmp_path / "secret"))
    flags = ["--nnodes", "2", "--rdzv-endpoint", "localhost:0", "--", str(tmp_path / "train.py")]
    with pytest.raises(JobFailedError, match="localhost:0: nodes cannot find each other without a port"):
        read_settings(parse(flags), tmp_path, tmp_path)


TOLD_TO_END = """
import os, signal, sys
from hyperpod_ext.runtime.agent import __main__ as agent
from hyperpod_ext.scratch import Scratch

remove = Scratch.remove

def remove_late(scratch):
    os.kill(os.getpid(), signal.SIGTERM)
    remove(scratch)

Scratch.remove = remove_late
agent.main()
"""


@pytest.mark.parametrize("script", ["train.py", "missing.py"])
def test_an_agent_that_is_told_to_end_while_it_removes_its_folder_removes_it(script: str, tmp_path: Path) -> None:
    """One has had an event loop by then, which gives SIGTERM back to the kernel when it closes."""
    (tmp_path / "train.py").touch()
    (tmp_path / "tmp").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = ["--rdzv-endpoint", f"127.0.0.1:{taken.getsockname()[1]}", "--", script]
        env = {name: value for name, value in os.environ.items() if not name.startswith("HPX_")}
        done = subprocess.run(
            [sys.executable, "-c", TOLD_TO_END, *flags],
            env=env | {"TMPDIR": str(tmp_path / "tmp")},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
    assert done.returncode in (5, 7), done.stderr
    assert list((tmp_path / "tmp").iterdir()) == []

"""A real Prometheus, where there is one: on PATH or in the folder $HPX_PROMETHEUS. Debian's `prometheus` has it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from debian import cannot_run, install_under_ci

from hyperpod_ext.ports import free_port


def program(name: str) -> str:
    """Path of `prometheus` or `promtool`. Skips the test where it is missing; fails it under CI."""
    if (found := _find(name)) is None:
        install_under_ci("prometheus")
        found = _find(name)
    if found is None:
        cannot_run(f"there is no {name} here: apt-get install prometheus, or name its folder in HPX_PROMETHEUS")
    return found


def _find(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ.get("HPX_PROMETHEUS", ""), os.environ["PATH"]]))


class Prometheus:
    """One that runs."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str, **query: str) -> Any:
        """`data` of an answer of its API, which must be a success."""
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(query)}") as answer:
            said = json.load(answer)
        assert said["status"] == "success", said
        return said["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series now."""
        found = self.get("query", query=expression)["result"]
        return [(series["metric"], float(series["value"][1])) for series in found]

    def until(self, expression: str, timeout_s: float = 30.0) -> list[tuple[dict[str, str], float]]:
        """What it finds, once it finds something."""
        deadline = time.monotonic() + timeout_s
        while not (found := self.query(expression)):
            assert time.monotonic() < deadline, f"{expression} found nothing in {timeout_s:g} s"
            time.sleep(0.1)
        return found


@contextmanager
def prometheus(folder: Path, rules: Path, target: str) -> Iterator[Prometheus]:
    """Scrapes `target` twice a second."""
    folder.mkdir()
    config = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "hyperpod_ext", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [
        program("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder}/tsdb",
    ]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(url, process, folder / "log")
        yield Prometheus(url)
    finally:
        process.terminate()
        process.wait()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    while True:
        assert process.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(f"{url}/-/ready").close()
        except (ConnectionError, urllib.error.URLError):
            time.sleep(0.05)
        else:
            return

"""A real browser for tests: Debian's Chromium without a window or a network.

`apt-get install chromium`: a machine without it skips these tests and says so; under CI it is installed, or they fail.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from debian import cannot_run, install_under_ci

_OPTIONS = (
    "--headless",
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--enable-logging=stderr",
)
_CONSOLE = re.compile(r"CONSOLE.*?\] (.*)")
_TIMEOUT_S = 60.0


def require() -> None:
    """Skip where there is no Chromium; fail under CI."""
    if _browser() is None:
        install_under_ci("chromium")
    if _browser() is None:
        cannot_run("there is no Chromium here: apt-get install chromium")


@dataclass(frozen=True)
class Opened:
    """A page as the browser has it after everything was loaded."""

    dom: str
    console: list[str]
    """What came to the console, and what could not be loaded."""

    def data(self) -> dict[str, tuple[str, str]]:
        """Value and text of each `<data>` element, by its key."""
        reader = _DataReader()
        reader.feed(self.dom)
        return reader.found


def open_page(page: Path) -> Opened:
    """Load a file and read it back."""
    done = _run("--dump-dom", page.resolve().as_uri())
    return Opened(done.stdout, _CONSOLE.findall(done.stderr))


def photograph(page: Path, picture: Path, *, dark: bool, width: int = 1100, height: int = 2400) -> None:
    """Write a PNG of the page as a reader with light or dark settings sees it."""
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    _run(scheme, f"--window-size={width},{height}", f"--screenshot={picture}", page.resolve().as_uri())


@contextlib.contextmanager
def running(url: str) -> Iterator[None]:
    """A browser that shows `url` until the end of the context. It reaches this machine alone."""
    browser = _browser()
    assert browser is not None, "call require() first"
    with tempfile.TemporaryDirectory(prefix="hpx-browser", ignore_cleanup_errors=True) as profile:
        options = [f"--user-data-dir={profile}", "--remote-debugging-port=0", "--window-size=1700,1000"]
        options += ["--disable-background-timer-throttling", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen([browser, *_OPTIONS, *options, url], **quiet)
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    browser = _browser()
    assert browser is not None, "call require() first"
    with tempfile.TemporaryDirectory(prefix="hpx-browser", ignore_cleanup_errors=True) as profile:
        command = [browser, *_OPTIONS, f"--user-data-dir={profile}", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)


def _browser() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class _DataReader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, tuple[str, str]] = {}
        self._open: tuple[str, str] | None = None
        self._text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "data":
            about = dict(attrs)
            self._open, self._text = (about["data-key"] or "", about["value"] or ""), ""

    def handle_data(self, data: str) -> None:
        self._text += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "data" and self._open is not None:
            key, value = self._open
            assert key not in self.found, f"{key} is shown twice"
            self.found[key] = (value, self._text)
            self._open = None

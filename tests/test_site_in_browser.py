"""Every page of the built documentation site in a browser: narrow and wide, light and dark."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import browser
import docs_env
import pytest
from debian import cannot_run
from site_check import check
from venv_over_ours import UnavailableError

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(2400)]


def test_every_page_can_be_read(root: Path, tmp_path: Path) -> None:
    browser.require()
    try:
        python = docs_env.install()
    except UnavailableError as error:
        cannot_run(str(error))
    build = [python, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=root, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    found = check(tmp_path / "site")
    assert found["views"] > 1000
    assert found["findings"] == []

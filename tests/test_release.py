"""The changelog has a section for the version of the package, and a release takes its notes from this section."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import pythons
from release import built, fresh, notes
from release.steps import StepFailedError, run, step

from hyperpod_ext.version import __version__

CHANGELOG = "# Changelog\n\n## 1.1.0 (2026-12-01)\n\n- New.\n\n## 1.0.0 (2026-11-01)\n\n- Old.\n"


def test_the_changelog_is_of_this_version_and_short(root: Path) -> None:
    text = (root / "CHANGELOG.md").read_text()
    assert notes.newest(text).version == __version__
    assert len(text.splitlines()) <= 80


def test_the_notes_are_the_newest_section() -> None:
    assert notes.newest(CHANGELOG).notes() == "# hyperpod_ext 1.1.0 (2026-12-01)\n\n- New.\n"
    assert notes.newest("## 1.0.0 (unreleased)\n- Old.").notes() == "# hyperpod_ext 1.0.0 (unreleased)\n\n- Old.\n"


@pytest.mark.parametrize("text", ["# Changelog\n", "## 1.0.0\n", "## 1.0.0 (soon)\n"])
def test_a_changelog_without_a_date_is_refused(text: str) -> None:
    with pytest.raises(StepFailedError, match="CHANGELOG"):
        notes.newest(text)


def test_a_tree_with_changes_is_refused(tmp_path: Path) -> None:
    author = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    run("git", "init", "--quiet", cwd=tmp_path)
    run("git", *author, "commit", "--quiet", "--allow-empty", "--message", "First", cwd=tmp_path)
    assert len(built.check_tree(tmp_path)) == 40
    (tmp_path / "new.py").touch()
    with pytest.raises(StepFailedError, match=r"new\.py"):
        built.check_tree(tmp_path)


def test_compilers_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = ("cc", "x86_64-linux-gnu-gcc-12", "clang++", "g++", "python3", "ccache", "git")
    (tmp_path / "bin").mkdir()
    for name in programs:
        (tmp_path / "bin" / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{tmp_path / 'missing'}")
    found = fresh.without_compilers(tmp_path / "programs")
    assert sorted(link.name for link in found.iterdir()) == ["ccache", "git", "python3"]


def test_a_step_that_fails_ends_the_release(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with step("one"):
        assert run(sys.executable, "-c", "print(1)", cwd=tmp_path) == "1\n"
    with pytest.raises(SystemExit), step("two"):
        run(sys.executable, "-c", "raise SystemExit(3)", cwd=tmp_path)
    with pytest.raises(SystemExit), step("three"):
        run(sys.executable, "-c", "1 / 0", cwd=tmp_path, code=1)
    output = capsys.readouterr().out
    assert output.startswith("ok ")
    assert "exited with 3, not 0" in output
    assert "printed a traceback" in output


def test_this_python_is_found() -> None:
    found = pythons.find(f"{sys.version_info.major}.{sys.version_info.minor}")
    assert found is not None
    assert found.exists()
    assert pythons.find("2.0") is None

"""Folders of a user without a home folder: one error, with the variable to set."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyperpod_ext import user_folders
from hyperpod_ext.errors import HyperpodExtError
from hyperpod_ext.jobs.contract.home import home
from hyperpod_ext.runtime.storage.file import FileStore


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user id without an entry in /etc/passwd."""

    def no_home(self: object = None) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(Path, "expanduser", no_home)


@pytest.mark.parametrize("folder", [user_folders.state_folder, user_folders.cache_folder, home])
def test_without_home_the_error_names_the_variable_to_set(folder) -> None:
    with pytest.raises(HyperpodExtError, match="has no home folder: HOME is not set") as error:
        folder({})
    assert error.value.hint.startswith("Set XDG_")
    assert folder({"HOME": "/h"}).is_relative_to("/h")


def test_a_tilde_in_a_path_is_named() -> None:
    with pytest.raises(HyperpodExtError, match=r"~/checkpoints: `~` stands for a home folder"):
        FileStore("~/checkpoints")

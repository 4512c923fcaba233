"""The code that a training job gets: from an archive, and nowhere outside of its folder."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from hyperpod_ext.errors import HyperpodExtError
from hyperpod_ext.runtime.container_sagemaker import ARCHIVE, _fetch_code


@pytest.fixture
def ml(tmp_path: Path) -> Path:
    """/opt/ml, as SageMaker fills it."""
    config = tmp_path / "ml" / "input" / "config"
    config.mkdir(parents=True)
    (tmp_path / "ml" / "input" / "data" / "code").mkdir(parents=True)
    values = {"sagemaker_program": json.dumps("train.py"), "epochs": "not json"}
    (config / "hyperparameters.json").write_text(json.dumps(values))
    return tmp_path / "ml"


def pack(ml: Path, *members: tuple[tarfile.TarInfo, bytes]) -> None:
    with tarfile.open(ml / "input" / "data" / "code" / ARCHIVE, "w:gz") as archive:
        for info, data in members:
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def test_an_archive_is_unpacked_into_the_folder_of_the_code(ml: Path) -> None:
    pack(ml, (tarfile.TarInfo("train.py"), b"print()"))
    script, folder = _fetch_code(ml)
    assert (folder / script).read_bytes() == b"print()"
    assert folder == ml / "code"


def test_nothing_is_written_outside_of_it(ml: Path) -> None:
    pack(ml, (tarfile.TarInfo("../../outside"), b"evil"))
    with pytest.raises(HyperpodExtError, match=r"outside.*inside the code's folder"):
        _fetch_code(ml)
    assert not (ml.parent / "outside").exists()


def test_no_link_leads_outside_of_it(ml: Path) -> None:
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc"
    pack(ml, (link, b""))
    with pytest.raises(HyperpodExtError, match="'link'"):
        _fetch_code(ml)
    assert not (ml / "code" / "link").is_symlink()


def test_no_file_goes_through_a_link_and_no_device_is_made(ml: Path) -> None:
    inside, through, device = tarfile.TarInfo("data"), tarfile.TarInfo("data/../../evil"), tarfile.TarInfo("null")
    inside.type, inside.linkname, device.type = tarfile.SYMTYPE, ".", tarfile.CHRTYPE
    for bad in (through, device):
        pack(ml, (inside, b""), (bad, b""))
        with pytest.raises(HyperpodExtError, match=bad.name):
            _fetch_code(ml)
    assert [path.name for path in (ml / "code").iterdir()] == ["data"]
    assert not (ml / "evil").exists()


def test_a_channel_without_an_archive_is_the_code(ml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = ml / "input" / "data" / "code"
    (channel / "train.py").write_text("print()")
    assert _fetch_code(ml) == ("train.py", channel)
    monkeypatch.setenv("HPX_SCRIPT", "other.py")
    assert _fetch_code(ml) == ("other.py", channel)

"""Of a library with code for several GPUs, that of one is kept, and nothing moves."""

from __future__ import annotations

import struct

import bring_torch
import pytest


def entry(kind: int, arch: int, code: bytes) -> bytes:
    head = struct.pack("<HHIQ", kind, 0x101, 64, len(code))
    return head.ljust(28, b"\1") + struct.pack("<I", arch).ljust(36, b"\2") + code


def fatbin(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_only_machine_code_of_that_gpu_is_kept() -> None:
    looks_like = struct.pack("<I", 0xBA55ED50) + b"not one at all......"
    parts = [b"before", looks_like, fatbin(entry(2, 80, b"a" * 5), entry(2, 90, b"b" * 7), entry(1, 90, b"p" * 9))]
    library = bytearray(b"".join([*parts, b"after", fatbin(entry(2, 100, b"c" * 3))]))
    before = bytes(library)
    assert bring_torch.keep_code(library, 90) == 7
    assert bytes(library) == before.replace(b"a" * 5, bytes(5)).replace(b"p" * 9, bytes(9)).replace(b"c" * 3, bytes(3))


def test_what_must_be_of_the_same_version_is_brought() -> None:
    metadata = (
        "Name: torch\nRequires-Dist: filelock\n"
        'Requires-Dist: nvidia-nccl-cu13==2.30.7; platform_system == "Linux"\n'
        'Requires-Dist: nvidia-nvshmem-cu13==3.7.2; platform_system == "Linux"\n'
        'Requires-Dist: nvidia-cudnn-cu13==9.26.0.51; platform_system == "Linux"\n'
    )
    assert bring_torch.needed(metadata) == ["nvidia-nccl-cu13==2.30.7", "nvidia-nvshmem-cu13==3.7.2"]


def test_a_folder_that_is_not_empty_is_refused(tmp_path, capsys) -> None:
    (tmp_path / "there").touch()
    with pytest.raises(SystemExit) as caught:
        bring_torch.main(["2.15.0", "--out", str(tmp_path)])
    assert caught.value.code == 2
    assert "is not empty" in capsys.readouterr().err

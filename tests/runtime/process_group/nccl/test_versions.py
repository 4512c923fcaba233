"""Which NCCL, torch and network plugin are refused, and how it is found out what is there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hyperpod_ext.runtime.process_group.nccl import versions
from hyperpod_ext.runtime.process_group.nccl.versions import (
    PINNED,
    Component,
    LibraryProblem,
    Version,
    installed,
    judge,
)


def found(nccl: Version, torch: Version = (2, 13, 0)) -> list[LibraryProblem]:
    return judge([Component("torch", torch), Component("NCCL", nccl, "libnccl.so.2")])


@pytest.mark.parametrize(
    ("nccl", "torch", "severity"),
    [
        ((2, 25, 1), (2, 6, 0), "refuse"),
        ((2, 26, 1), (2, 6, 0), "refuse"),
        ((2, 26, 2), (2, 7, 0), "refuse"),  # with this torch
        ((2, 28, 0), (2, 11, 0), "refuse"),
        ((2, 28, 8), (2, 11, 0), "refuse"),
        ((2, 31, 2), (2, 15, 0), "warn"),
        ((2, 27, 7), (2, 15, 0), "refuse"),  # nccl2 cannot reconfigure with it
    ],
)
def test_a_bad_version_is_found(nccl: Version, torch: Version, severity: str):
    assert [finding.severity for finding in found(nccl, torch)] == [severity]


@pytest.mark.parametrize(
    ("nccl", "torch"),
    [
        ((2, 21, 5), (2, 6, 0)),
        ((2, 25, 0), (2, 6, 0)),
        ((2, 26, 2), (2, 7, 1)),
        ((2, 26, 2), (2, 6, 0)),
        ((2, 27, 7), (2, 10, 0)),
        ((2, 28, 9), (2, 11, 0)),
        ((2, 28, 9), (2, 15, 0)),
        ((2, 31, 1), (2, 15, 0)),
        *((nccl, torch) for torch, nccl in PINNED.items()),
    ],
)
def test_no_other_version_is_found(nccl: Version, torch: Version):
    assert found(nccl, torch) == []


def test_a_bad_version_is_told_with_its_file_why_the_source_and_what_is_good():
    [finding] = found((2, 25, 1))
    assert str(finding.problem) == (
        "libnccl.so.2: NCCL: 2.25.1: ncclCommAbort hangs (pytorch/pytorch#149153) (Good: 2.26.2 or newer.)"
    )


@pytest.mark.parametrize(
    ("version", "severities"),
    [((1, 13, 2), ["refuse"]), ((1, 16, 0), ["warn"]), ((1, 17, 9), ["warn"]), ((1, 18, 0), []), ((1, 21, 1), [])],
)
def test_a_network_plugin_is_judged_by_its_version(version: Version, severities: list[str]):
    assert [finding.severity for finding in judge([Component("aws-ofi-nccl", version)])] == severities


def test_an_unknown_version_is_said_and_not_guessed():
    [finding] = judge([Component("torch", (2, 13, 0)), Component("NCCL", None, "libnccl.so.2")])
    assert finding.severity == "unknown"
    assert str(finding.problem).startswith("libnccl.so.2: NCCL: its version could not be read")


def test_what_is_not_there_is_not_judged():
    assert judge([]) == []
    assert judge([Component("NCCL", (2, 27, 7))]) == []  # which torch is beside it is not known


@pytest.mark.parametrize(("code", "version"), [(22907, (2, 29, 7)), (21205, (2, 12, 5)), (2804, (2, 8, 4))])
def test_ncclgetversion_gives_a_number(code: int, version: Version):
    assert versions.version_of_code(code) == version


def library(folder: Path, source: str) -> str:
    """A shared library made of C."""
    (folder / "nccl.c").write_text(source)
    made = folder / "libnccl.so.2"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", made, folder / "nccl.c"], check=True)
    return str(made)


def test_a_library_says_its_version_itself(tmp_path: Path):
    path = library(tmp_path, "int ncclGetVersion(int *version) { *version = 23007; return 0; }\n")
    missing = str(tmp_path / "gone.so")
    assert versions._nccl([(missing, os.RTLD_NOW), (path, os.RTLD_NOW)]) == Component("NCCL", (2, 30, 7), path)
    assert versions._nccl([(missing, os.RTLD_NOW)]) is None


@pytest.mark.parametrize("source", ["int other;\n", "int ncclGetVersion(int *version) { *version = 1; return 5; }\n"])
def test_a_library_that_does_not_say_it_is_unknown(tmp_path: Path, source: str):
    path = library(tmp_path, source)
    assert versions._nccl([(path, os.RTLD_NOW)]) == Component("NCCL", None, path)


def plugins(environ: dict[str, str], *folders: Path) -> list[Component]:
    return [component for component in installed(environ, folders=folders) if component.name == "aws-ofi-nccl"]


def plugin(folder: Path, content: bytes, name: str = "libnccl-net.so") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"\x7fELF" + bytes(5000) + content + bytes(100))
    return folder / name


@pytest.mark.parametrize(
    ("content", "version"),
    [
        (b"NET/OFI Initializing aws-ofi-nccl 1.13.2-aws\0", (1, 13, 2)),
        (b"aws-ofi-nccl 1.21.1\0", (1, 21, 1)),
        (b"aws-ofi-nccl git-6e504db\0", None),  # built from a commit
    ],
)
def test_a_plugins_version_is_read_in_its_file(tmp_path: Path, content: bytes, version: Version | None):
    path = plugin(tmp_path / "lib", content)
    assert plugins({"LD_LIBRARY_PATH": f":{tmp_path / 'lib'}"}) == [Component("aws-ofi-nccl", version, str(path))]


def test_another_vendors_plugin_of_the_same_name_is_passed_over(tmp_path: Path):
    plugin(tmp_path / "hpcx", b"NCCL RDMA plugin v9\0")
    (tmp_path / "hpcx" / "libnccl-net-empty.so").touch()
    ours = plugin(tmp_path / "ofi", b"aws-ofi-nccl 1.18.0\0", "libnccl-net-ofi.so")
    assert plugins({"LD_LIBRARY_PATH": str(tmp_path / "hpcx")}, tmp_path / "ofi") == [
        Component("aws-ofi-nccl", (1, 18, 0), str(ours))
    ]


def test_the_plugin_that_the_environment_chooses_comes_first(tmp_path: Path):
    chosen = plugin(tmp_path / "own", b"aws-ofi-nccl 1.16.0\0")
    plugin(tmp_path / "lib", b"aws-ofi-nccl 1.18.0\0")
    environ = {"LD_LIBRARY_PATH": str(tmp_path / "lib"), "NCCL_NET_PLUGIN": str(chosen)}
    assert [component.version for component in plugins(environ)] == [(1, 16, 0)]
    assert plugins({**environ, "NCCL_NET_PLUGIN": "none"}) == []


def test_what_is_installed_here_is_read():
    known = {component.name: component.version for component in installed({}, built_in=(2, 30, 7), folders=[])}
    assert (known["torch"] or ()) >= (2, 6)
    assert known["NCCL"] is not None  # a CUDA build has a library, another one takes what is said to be built in

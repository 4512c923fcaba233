"""Versions of NCCL, torch and aws-ofi-nccl with which recovery is known to fail, and the versions that are installed.

`judge` is a pure function. `installed` reads versions without loading a plugin and without a GPU, and reports an
unreadable version as unknown. The table `KNOWN_BAD` is based on the sources that it names; refused versions were not
tested.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from hyperpod_ext.errors import Problem

Version = tuple[int, ...]
Name = Literal["torch", "NCCL", "aws-ofi-nccl"]
Severity = Literal["refuse", "warn", "unknown"]

_NCCL = "libnccl.so.2"
_PLUGIN = "libnccl-net*.so*"
_PLUGIN_FOLDERS = (Path("/opt/amazon/ofi-nccl/lib"), Path("/opt/amazon/ofi-nccl/lib64"), Path("/opt/aws-ofi-nccl/lib"))
"""Folders in which EFA's installer and AWS's container images put the plugin aws-ofi-nccl."""
_LONGEST_READ = 64 << 20
"""Maximum number of bytes of a plugin file that are searched for the plugin's version."""
_PLUGIN_VERSION = re.compile(rb"aws-ofi-nccl[ -]v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?")


@dataclass(frozen=True, slots=True)
class Component:
    """A library that recovery depends on, with its version."""

    name: Name
    version: Version | None
    """Version of the library; None if it could not be read."""
    place: str = ""
    """File in which the version was found; empty if there is no file."""


@dataclass(frozen=True, slots=True)
class KnownBad:
    """Versions of one library with a known fault: from `since` up to, but not including, `before`.

    The fault may affect only some versions of torch."""

    name: Name
    since: Version
    before: Version
    severity: Severity
    why: str
    good: str
    """Description of the versions to use instead."""
    source: str
    torch: tuple[Version, Version] | None = None
    """Range of torch versions that are affected: from the first up to, but not including, the second. None for all
    versions."""


@dataclass(frozen=True, slots=True)
class LibraryProblem:
    """A problem with one installed library, and its severity."""

    severity: Severity
    problem: Problem


_ANY: Version = (0,)

KNOWN_BAD = (
    KnownBad(
        "NCCL", (2, 25, 1), (2, 26, 2), "refuse", "ncclCommAbort hangs", "2.26.2 or newer", "pytorch/pytorch#149153"
    ),
    KnownBad(
        "NCCL",
        (2, 28, 0),
        (2, 28, 9),
        "refuse",
        "a process that makes its communicators again ends with a segmentation fault",
        "2.28.9 or newer",
        "usage guide of NVIDIA's resiliency extension, in-process restart",
    ),
    KnownBad(
        "NCCL",
        (2, 31, 2),
        (2, 31, 3),
        "warn",
        "making a communicator deadlocks if nodes have different numbers of ranks",
        "2.30.7",
        "NVIDIA/nccl#2385",
    ),
    KnownBad(
        "NCCL",
        (2, 26),
        (2, 27),
        "refuse",
        "torch makes communicators without waiting for them, which hangs with this NCCL",
        "torch 2.7.1 or newer",
        "pytorch/pytorch#153960",
        torch=((2, 7, 0), (2, 7, 1)),
    ),
    KnownBad(
        "NCCL",
        _ANY,
        (2, 28, 9),
        "refuse",
        "it lacks ncclCommRevoke, by which torch's nccl2 reconfigures groups",
        "the NCCL that torch was built with, 2.30.7",
        "symbols of NVIDIA/nccl's releases; c10d/nccl2/NcclApi.hpp of torch 2.15.0",
        torch=((2, 15), (3,)),
    ),
    KnownBad(
        "aws-ofi-nccl",
        _ANY,
        (1, 16, 0),
        "refuse",
        "closing a connection hangs after a communicator was aborted",
        "1.18.0 or newer",
        "aws/aws-ofi-nccl, commit 7d67367d of v1.16.0",
    ),
    KnownBad(
        "aws-ofi-nccl",
        (1, 16, 0),
        (1, 18, 0),
        "warn",
        "aborting communicators in several threads at once sometimes crashes the process",
        "1.18.0 or newer",
        "aws/aws-ofi-nccl, commits ab505f3f of v1.17.0 and a50eedbf of v1.18.0",
    ),
)
"""All versions with known faults."""

PINNED: Mapping[Version, Version] = {(2, 13, 0): (2, 29, 7), (2, 14, 1): (2, 30, 7), (2, 15, 0): (2, 30, 7)}
"""Version of NCCL that each release of torch requires, according to the metadata of torch's wheel."""


def judge(components: Iterable[Component]) -> list[LibraryProblem]:
    """Return the problems of the installed libraries. A missing library is not a problem."""
    there = {component.name: component for component in components}
    torch = there["torch"].version if "torch" in there else None
    found = [_unknown(component) for component in there.values() if component.version is None]
    found += [
        LibraryProblem(bad.severity, _problem(bad, there[bad.name]))
        for bad in KNOWN_BAD
        if bad.name in there and _is_bad(bad, there[bad.name].version, torch)
    ]
    return found


def _is_bad(bad: KnownBad, version: Version | None, torch: Version | None) -> bool:
    if version is None or not bad.since <= version < bad.before:
        return False
    return bad.torch is None or (torch is not None and bad.torch[0] <= torch < bad.torch[1])


def _problem(bad: KnownBad, component: Component) -> Problem:
    return Problem(
        f"{written(component.version)}: {bad.why} ({bad.source})",
        path=component.name,
        source=component.place,
        hint=f"Good: {bad.good}.",
    )


def _unknown(component: Component) -> LibraryProblem:
    why = "its version could not be read, so it is not known whether recovery works with it"
    return LibraryProblem("unknown", Problem(why, path=component.name, source=component.place))


def written(version: Version | None) -> str:
    return "unknown" if version is None else ".".join(map(str, version))


def version_of_code(code: int) -> Version:
    """Return the version for a number from `ncclGetVersion`: 22907 is 2.29.7. Before NCCL 2.9, the numbers have one
    digit less."""
    major, rest = divmod(code, 10_000 if code >= 10_000 else 1_000)
    return (major, *divmod(rest, 100))


# --- installed versions ---------------------------------------------------------------------------


def installed(
    environ: Mapping[str, str], *, built_in: Version | None = None, folders: Iterable[Path] = _PLUGIN_FOLDERS
) -> list[Component]:
    """Return the libraries that this process has loaded or would load.

    Args:
        built_in: `torch.cuda.nccl.version()`, the NCCL version with which torch was built. This version is returned if
            no NCCL library is found, because some builds of torch contain NCCL.
        folders: folders in which to search for the plugin after the folders in LD_LIBRARY_PATH.
    """
    found = [_torch(), _nccl(_nccl_libraries()) or (built_in and Component("NCCL", built_in[:3], "torch"))]
    found.append(_plugin(_plugin_files(environ, folders)))
    return [component for component in found if component]


def _torch() -> Component | None:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
    digits = re.match(r"(\d+)\.(\d+)\.(\d+)", version)  # 2.15.0+cu132, 2.16.0.dev20261101
    return Component("torch", tuple(map(int, digits.groups())) if digits else None)


def _nccl_libraries() -> Iterator[tuple[str, int]]:
    """Yield names and dlopen flags of NCCL libraries in torch's search order: loaded, wheel (torch's RPATH), system."""
    yield _NCCL, os.RTLD_NOW | os.RTLD_NOLOAD
    spec = find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        yield str(Path(folder, "nccl", "lib", _NCCL)), os.RTLD_NOW
    yield _NCCL, os.RTLD_NOW


def _nccl(libraries: Iterable[tuple[str, int]]) -> Component | None:
    """Return the first NCCL library that can be loaded, with the version that it reports (no GPU needed)."""
    for path, mode in libraries:
        try:
            library = ctypes.CDLL(path, mode=mode)
        except OSError:
            continue
        code = ctypes.c_int()
        answered = hasattr(library, "ncclGetVersion") and library.ncclGetVersion(ctypes.byref(code)) == 0
        return Component("NCCL", version_of_code(code.value) if answered else None, path)
    return None


def _plugin_files(environ: Mapping[str, str], folders: Iterable[Path]) -> Iterator[Path]:
    """Yield files that may be NCCL's network plugin, in the order in which NCCL searches them."""
    chosen = environ.get("NCCL_NET_PLUGIN", "")
    if chosen == "none":
        return
    if "/" in chosen:
        yield Path(chosen)
    named = [Path(folder) for folder in environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    for folder in (*named, *folders):
        yield from sorted(folder.glob(_PLUGIN))


def _plugin(files: Iterable[Path]) -> Component | None:
    """Return AWS's network plugin, recognized by its content, because other vendors use the same file name."""
    for path in files:
        if (text := _aws_text_in(path)) is not None:
            number = _PLUGIN_VERSION.fullmatch(text)
            version = tuple(int(part) for part in number.groups(default=b"0")) if number else None
            return Component("aws-ofi-nccl", version, str(path))
    return None


def _aws_text_in(path: Path) -> bytes | None:
    """Return the name and version of AWS's plugin from a file; only the name if no version was found; None if the file
    is another plugin."""
    try:
        with path.open("rb") as file:
            size = min(os.fstat(file.fileno()).st_size, _LONGEST_READ)
            with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as memory:
                found = _PLUGIN_VERSION.search(memory) or re.search(rb"aws-ofi-nccl", memory)
                return found[0] if found else None
    except (OSError, ValueError):  # the file is unreadable or empty
        return None

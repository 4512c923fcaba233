"""Pack a release of torch for a machine with a GPU and no package index, with the code of that GPU alone.

    python benchmarks/gpu/bring_torch.py 2.15.0 --sm 90 --python 3.12 --piece-mib 50 --out build/torch-2.15.0

Torch 2.15.0 is 190 MiB then, in pieces that can be brought one after the other. On the other machine, which has another
release of torch with the same major version of CUDA, `sh unpack.sh FOLDER` puts it together, and says which PYTHONPATH
to use. Needs pip, xz and five minutes here; xz or Python there.
"""

from __future__ import annotations

import argparse
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_MAGIC = struct.pack("<I", 0xBA55ED50)
_HEADER, _ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQ")
_ARCH_AT = 28
_BINARY = 2
"""Kind of an entry that is machine code; 1 is PTX. All as they lie in the libraries of torch 2.11 to 2.15."""
_BROUGHT = ("nvidia-nccl", "nvidia-nvshmem")
"""Of what torch asks for, the libraries that must be of its own version. The others are the machine's."""
_LEFT_OUT = ("include", "share", "test", "lib/libtorch_cuda_linalg.so")
_UNPACK = """\
#!/bin/sh
# Put together in the folder that is named. Libraries of CUDA are those of the torch that python3 has.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
unxz_() { if command -v xz > /dev/null; then xz -dc "$1"; else python3 -c "
import lzma, shutil, sys
shutil.copyfileobj(lzma.open(sys.argv[1]), sys.stdout.buffer, 1 << 22)" "$1"; fi; }
cat "$here"/piece.* | tar xf - -C "$1"
for packed in "$1"/*.tar.xz; do (unxz_ "$packed" | tar xf - -C "$1" && rm "$packed") & done
wait
theirs=$(python3 -c "import nvidia; print(list(nvidia.__path__)[0])")
for folder in "$theirs"/*; do [ -e "$1/nvidia/$(basename "$folder")" ] || ln -s "$folder" "$1/nvidia/"; done
echo "PYTHONPATH=$1"
"""


def keep_code(library: bytearray, sm: int) -> int:
    """Fill with zeros what a library has for other GPUs than those of `sm`; returns the bytes that are kept."""
    kept, at = 0, 0
    while (at := library.find(_MAGIC, at)) >= 0:
        _, _, header, size = _HEADER.unpack_from(library, at)
        end = at + header + size
        if header != _HEADER.size or end > len(library):  # bytes that look like it
            at += len(_MAGIC)
            continue
        entry = at + header
        while entry < end:
            kind, _, before, length = _ENTRY.unpack_from(library, entry)
            (arch,) = struct.unpack_from("<I", library, entry + _ARCH_AT)
            if kind == _BINARY and arch == sm:
                kept += length
            else:
                library[entry + before : entry + before + length] = bytes(length)
            entry += before + length
        at = end
    return kept


def needed(metadata: str) -> list[str]:
    """What pip is to bring beside torch, from the wheel's METADATA."""
    found = re.findall(r"^Requires-Dist: (\S+?==[^\s;]+)", metadata, re.MULTILINE)
    return [one for one in found if one.startswith(_BROUGHT)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("torch", help="its version")
    parser.add_argument("--sm", type=int, default=90, help="of the GPU: 90 for H100 and H200 (default)")
    parser.add_argument("--python", default="3.12", help="of the other machine (default: 3.12)")
    parser.add_argument("--piece-mib", type=int, default=50, help="size of a piece (default: 50)")
    parser.add_argument("--out", type=Path, required=True, help="an empty folder")
    args = parser.parse_args(arguments)
    if shutil.which("xz") is None:
        parser.error("there is no xz here")
    if args.out.exists() and any(args.out.iterdir()):
        parser.error(f"{args.out} is not empty")
    work = args.out / "work"
    work.mkdir(parents=True)
    try:
        _pack(args, work)
    except subprocess.CalledProcessError as error:
        print(f"{Path(error.cmd[0]).name} failed, and has said why", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(work)
    print(f"{args.out}: {len(list(args.out.glob('piece.*')))} pieces and unpack.sh")
    return 0


def _pack(args: argparse.Namespace, work: Path) -> None:
    wheel = _download(f"torch=={args.torch}", args.python, work)
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        wheels = [wheel, *(_download(one, args.python, work) for one in needed(archive.read(metadata).decode()))]
    site = _unpacked(wheels, work / "site", args.sm)
    print("compressing", flush=True)
    _write_pieces(site, work, args.out, args.piece_mib << 20)
    (args.out / "unpack.sh").write_text(_UNPACK)


def _download(what: str, python: str, work: Path) -> Path:
    print(f"downloading {what}", flush=True)
    folder = work / what.partition("==")[0]
    platforms = [f"--platform=manylinux{name}_x86_64" for name in ("_2_28", "_2_27", "_2_18", "_2_17", "2014")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *platforms]
    subprocess.run([*command, f"--python-version={python}", "--implementation=cp", "-d", folder, what], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _unpacked(wheels: list[Path], site: Path, sm: int) -> Path:
    for wheel in wheels:
        subprocess.run([sys.executable, "-m", "zipfile", "-e", wheel, site], check=True)
        wheel.unlink()
    for name in _LEFT_OUT:
        path = site / "torch" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for path in site.rglob("*"):
        if path.suffix in (".a", ".bc", ".h") or (path.parent.name == "bin" and path.name != "torch_shm_manager"):
            path.unlink() if path.is_file() else None
    (site / "torch/bin/torch_shm_manager").chmod(0o755)  # a zip file does not keep it
    for library in [*site.rglob("*.so"), *site.rglob("*.so.*")]:
        content = bytearray(library.read_bytes())
        if _MAGIC in content:
            kept = keep_code(content, sm)
            library.write_bytes(content)
            print(f"{library.name}: {kept >> 20} MiB of code for sm_{sm}", flush=True)
    return site


def _write_pieces(site: Path, work: Path, out: Path, piece: int) -> None:
    large = [path for path in site.rglob("*.so*") if path.stat().st_size > 100 << 20]
    parts = [[path] for path in large] + [[path for path in site.rglob("*") if path.is_file() and path not in large]]
    with ThreadPoolExecutor() as pool:
        packed = list(pool.map(lambda number: _compressed(site, parts[number], work, number), range(len(parts))))
    whole = work / "all.tar"
    with tarfile.open(whole, "w") as archive:
        for path in packed:
            archive.add(path, path.name)
    with whole.open("rb") as content:
        for number, chunk in enumerate(iter(lambda: content.read(piece), b"")):
            (out / f"piece.{number:02}").write_bytes(chunk)


def _compressed(site: Path, files: list[Path], work: Path, number: int) -> Path:
    path = work / f"{number}.tar"
    with tarfile.open(path, "w") as archive:
        for file in files:
            archive.add(file, file.relative_to(site))
    subprocess.run(["xz", "-T1", "--x86", "--lzma2=preset=6,dict=64MiB", path], check=True)
    return path.with_suffix(".tar.xz")


if __name__ == "__main__":
    sys.exit(main())

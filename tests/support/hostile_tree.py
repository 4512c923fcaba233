"""Durable tiers as a stranger may leave them, who can write there and lacks the job's secret, drawn from a seed."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

from hyperpod_ext.runtime.snapshot.layout_plan import Plan
from hyperpod_ext.runtime.snapshot.manifest import FORMAT, Manifest, crc64nvme, crc_text, save_id_of, sign
from hyperpod_ext.runtime.storage.checkpoints import Checkpoints
from hyperpod_ext.runtime.storage.file import FileStore
from hyperpod_ext.runtime.storage.names import folder_of, image_of

JOB, SECRET = "j", b"0123456789abcdef0123456789abcdef"
PLAN = Plan(["V"], (), 1000)
ESCAPES = "\x1b]0;PWNED\x07\x1b[2J\x9b31m\u202eEVIL\r\n"


def save(checkpoints: Checkpoints, step: int, generation: int = 1, ranks: int = 2) -> None:
    """A whole checkpoint, as the job writes it."""
    folder, manifests, macs = folder_of(step, generation), {}, {}
    checkpoints.put_plan(folder, PLAN)
    for rank in range(ranks):
        image = memoryview(bytes([(step + rank) % 256]) * PLAN.nbytes)
        manifests[rank] = manifest_of(rank, ranks, step, generation, crc_text(crc64nvme(image)))
        checkpoints.store.put(f"{folder}/{image_of(rank)}", image, manifests[rank]["crc64nvme"])
        macs[image_of(rank)] = checkpoints.mac(image)
    files = {rank: image_of(rank) for rank in manifests}
    assert checkpoints.commit(folder, manifests, files, macs, {PLAN.digest: PLAN}.get)


def manifest_of(rank: int, ranks: int, step: int, generation: int, crc: str) -> Manifest:
    one = {"format": FORMAT, "job": JOB, "rank": rank, "step": step, "generation": generation, "world_size": ranks}
    content = {"plan": PLAN.digest, "nbytes": PLAN.nbytes, "crc64nvme": crc, "values": [step], "extras": {}}
    return sign(one | content | {"save_id": save_id_of(generation, step)}, SECRET)


def outside_of(folder: Path) -> dict[str, tuple[object, ...]]:
    """Everything below a folder: kind and mode, size, time of the last change, and a digest of the bytes."""
    found = {}
    for above, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(above, name)
            status = path.lstat()
            digest = sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(status.st_mode) else ""
            found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns, digest)
    return found


class HostileTree:
    """Makes a job's folder, with the good steps 10 and 20, a trap.

    Args:
        root: the job's folder.
        outside: a folder that nothing may touch, with files named as a checkpoint's.
    """

    def __init__(self, root: Path, outside: Path, seed: int) -> None:
        self.root, self.outside, self.random = root, outside, Random(seed)
        self.made: list[str] = []
        """What was done, for the message of a test that fails."""
        self._heavy = self.random.random() < 0.15
        """Whether something of many megabytes is among it: that takes time to write."""
        for name in ("manifest.json", "__0_0.distcp", "thesis.tex", ".x.0123456789abcdef.partial", "deep/000001.json"):
            (outside / name).parent.mkdir(parents=True, exist_ok=True)
            (outside / name).write_text("years of work")
            os.utime(outside / name, (1_000_000_000,) * 2)
        checkpoints = Checkpoints(FileStore(root), job=JOB, secret=SECRET)
        checkpoints.fence(1, 0, "run")
        for step in (10, 20):
            save(checkpoints, step)
        self._good = (root / folder_of(20, 1) / "manifest.json").read_bytes()

    def grow(self, harms: int = 30) -> None:
        """Add so many."""
        for _ in range(harms):
            place = self._place()
            thing = self.random.choice((self._link, self._link, self._node, self._text, self._text, self._forged))
            with contextlib.suppress(OSError):  # the name is too long, or another one has it
                place.parent.mkdir(parents=True, exist_ok=True)
                if place.parent.name == folder_of(10, 1):
                    place.unlink(missing_ok=True)
                if os.path.lexists(place):
                    continue
                thing(place)
                self.made.append(f"{thing.__name__} {str(place.relative_to(self.root))!r}")

    # --- names ----------------------------------------------------------------------------------

    def _place(self) -> Path:
        good, folders = [folder_of(step, 1) for step in (20, 10)], ("generations", "events", "a/b/c")
        if self.random.random() < 0.5:
            folder = folder_of(self.random.choice((0, 15, 21, 30, 10_000)), self.random.choice((1, 1, 2, 3, 20_000)))
            return self.root / folder / self.random.choice(("manifest.json", self._file()))
        folder = self.random.choice((".", ".", self._step(), self._step(), *good, *folders))
        name = self.random.choice((self._file, self._file, self._file, self._odd, self._step, self._claim))
        return self.root / folder / name()

    def _step(self) -> str:
        step, generation = self._number(), self._number()
        odd = (f"step-{step:09d}-g{generation:06d}x", f"step-{step:011d}-g{generation:08d}")
        return self.random.choice((*(folder_of(step, generation),) * 6, *odd, "step-00000000\u0665-g000001"))

    def _number(self) -> int:
        return self.random.choice((0, 1, 2, 5, 19, 21, 30, 10_000, 999_999_999, 10**14, 2**63 - 1, 2**63, 10**40))

    def _claim(self) -> str:
        return f"{self._number():06d}.json"

    def _file(self) -> str:
        node = self.random.choice((0, 1, 7, 10**8, 10**30))
        kind = self.random.choice(("node", "done", "failed", "left"))
        of_checkpoint = ("__0_0.distcp", "__1_0.distcp", "__0_1.distcp", ".metadata", f"plan-{PLAN.digest[:32]}.json")
        return self.random.choice((*("manifest.json",) * 8, *of_checkpoint, f"{kind}-{node}.json", "1-00000-1.jsonl"))

    def _odd(self) -> str:
        partial = f".{self._file()}.0123456789abcdef.partial"
        odd = (ESCAPES, "a\nstep-000000050-g000001", "\udcff\udcfe", "x" * 255, "..%2f..", " ", "-rf", "a\\b", partial)
        return self.random.choice(odd)

    # --- things ---------------------------------------------------------------------------------

    def _link(self, place: Path) -> None:
        inside = self.root / folder_of(20, 1)
        targets = (self.outside, self.outside / "deep", self.outside / "manifest.json", place, Path("/dev/zero"))
        targets += (Path("/proc/self"), Path("../../.."), self.root, inside, inside / "manifest.json", Path("nowhere"))
        if self.random.random() < 0.2:
            place.hardlink_to(self.outside / "manifest.json")
        else:
            place.symlink_to(self.random.choice(targets))

    def _node(self, place: Path) -> None:
        kinds: list[Callable[[Path], object]] = [os.mkfifo, os.mkfifo, _socket, Path.mkdir, self._deep, self._many]
        self.random.choice([*kinds, _sparse])(place)

    def _deep(self, place: Path) -> None:
        """Folders in folders, deeper than a path may be long."""
        place.mkdir()
        above = os.open(place, os.O_DIRECTORY)
        for _ in range(400):
            os.mkdir("d" * 20, dir_fd=above)
            inner = os.open("d" * 20, os.O_DIRECTORY, dir_fd=above)
            os.close(above)
            above = inner
        os.close(above)

    def _many(self, place: Path) -> None:
        place.mkdir()
        for number in range(300):
            (place / f"step-{number:09d}-g000001").mkdir()
            (place / f"{number:06d}.json").touch()

    def _text(self, place: Path) -> None:
        large = 60 << 20 if self._heavy else 1 << 20
        self._heavy = False
        texts: tuple[Callable[[], bytes], ...] = (
            lambda: b"",
            lambda: b"x",
            lambda: b"\xff\xfe\x00",
            lambda: b"null",
            lambda: b'{"format": 1, "format": NaN, "step": -Infinity, "t": 1e999, "event": "step"}\n',
            lambda: b'{"format": 1, "generation": ' + b"9" * 4299 + b', "attempt": 1e400}',
            lambda: b'{"a":' * self.random.choice((900, 990, 100_000)) + b"1" + b"}" * 900,
            lambda: b'{"format": 1, "ranks": [' + b"[]," * (large // 3) + b"[]]}",
            lambda: b'{"ranks": {' + b",".join(b'"%d":{}' % n for n in range(large // 12)) + b"}}",
            lambda: b'{"t": 1, "event": "' + b"\\u001b]0;PWNED\\u0007" * 100 + b'"}\n',
            lambda: bytes(large),
            lambda: self._good[: self.random.randrange(len(self._good))],
            lambda: self._good,
        )
        place.write_bytes(self.random.choice(texts)())

    def _forged(self, place: Path) -> None:
        """A signed manifest with something changed; its folder has files that fit to it."""
        document = json.loads(self._good)
        for _ in range(self.random.randrange(1, 4)):
            self._change(document)
        if self.random.random() < 0.3:
            document = sign(document, b"another secret")
        place.write_text(json.dumps(document))
        for name in ("__0_0.distcp", "__1_0.distcp", "__0_1.distcp", ".metadata", f"plan-{PLAN.digest[:32]}.json"):
            if not os.path.lexists(place.with_name(name)):
                place.with_name(name).write_bytes((self.root / folder_of(20, 1) / name).read_bytes())

    def _change(self, document: Any) -> None:
        odd: tuple[Any, ...] = (None, [], {}, "", ESCAPES, -1, 2**70, 10**12, 1e308, float("nan"), float("inf"), True)
        odd += ("../../../outside/thesis.tex", "/etc/passwd", "__0_0.distcp", [[]] * 1000, {"0": ESCAPES}, 10**4000)
        while isinstance(document, dict) and document:
            key = self.random.choice(sorted(document, key=str))
            if not isinstance(document[key], dict) or self.random.random() < 0.4:
                break
            document = document[key]
        if isinstance(document, dict) and document:
            if self.random.random() < 0.2:
                document[ESCAPES] = document.pop(key)
            else:
                document[key] = self.random.choice(odd)


def _socket(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(place))


def _sparse(place: Path) -> None:
    with place.open("wb") as file:
        file.truncate(1 << 40)

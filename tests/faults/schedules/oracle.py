"""What must come back, by brute force over raw bytes. Shares no decision with the code it judges.

Two judges. `Copies` looks at every copy that is left, byte for byte, and says which commits the whole
world could have. `Promises` looks at no copy: from what happened it says which commits must be left.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyperpod_ext.runtime.memory_server.slots.slots import Slot, State
from hyperpod_ext.runtime.snapshot.image import Layout, views
from hyperpod_ext.runtime.snapshot.tree import take_apart

from .node import SECRET, Node, Worker
from .states import Kind, Moment, Objects

Commit = tuple[int, int]
"""Step and generation: the later of two compares greater."""
_FOLDER = re.compile(r"step-(\d+)-g(\d+)")


@functools.lru_cache(maxsize=8192)
def image_of(moment: Moment, kind: Kind, rank: int, world_size: int) -> bytes:
    """The bytes that a snapshot has when it is right."""
    objects = _objects(kind, rank, world_size)
    objects.write(moment)
    import torch

    parts = take_apart({name: _state(value) for name, value in objects.named().items()}, torch.Tensor)
    layout = Layout(parts)
    image = bytearray(layout.plan.nbytes)
    layout.write_frames(memoryview(image))
    with torch.no_grad():
        for view, local in zip(views(layout.plan, image), layout.locals, strict=True):
            view.copy_(local)
    return bytes(image)


@functools.lru_cache(maxsize=256)
def _objects(kind: Kind, rank: int, world_size: int) -> Objects:
    return Objects(kind, rank, world_size)


def _state(value: Any) -> Any:
    import torch

    return value.state_dict(keep_vars=True) if isinstance(value, torch.nn.Module) else value.state_dict()


@dataclass
class Run:
    """What has truly happened in one run of the job."""

    number: int
    name: str
    world_size: int
    commits: dict[Commit, Moment] = field(default_factory=dict)
    """State of each commit that some rank has made."""
    began: dict[int, int] = field(default_factory=dict)
    """Step at which each generation began, as it turned out in the end."""


def given_up(commit: Commit, began: Mapping[int, int]) -> bool:
    """Whether a later generation is known to have begun before this step."""
    return any(generation > commit[1] and start < commit[0] for generation, start in began.items())


@dataclass
class Stored:
    """A durable checkpoint, as its files are."""

    commit: Commit
    run: Run
    world_size: int
    whole: set[int]
    """Ranks whose image, plan and part of the manifest are right."""


def read_store(root: Path, runs: list[Run], kind: Kind) -> tuple[list[Stored], int]:
    """Every checkpoint that has a manifest of ours that is not damaged; and how many manifests there are."""
    found, manifests = [], 0
    for folder in sorted(root.glob("step-*")):
        try:
            match, data = _FOLDER.fullmatch(folder.name), (folder / "manifest.json").read_bytes()
        except FileNotFoundError:  # none yet, or none any more
            continue
        manifests += 1
        if match is None or (manifest := _signed(data)) is None:
            continue
        commit = int(match[1]), int(match[2])
        if (manifest["step"], manifest["generation"]) != commit:
            continue
        world_size = int(manifest["world_size"])
        best: Stored | None = None
        for run in runs:
            if commit not in run.commits or run.world_size != world_size:
                continue
            moment = run.commits[commit]
            right = {r for r in range(world_size) if _is_right(folder, manifest, r, moment, kind, world_size)}
            if best is None or len(right) > len(best.whole):
                best = Stored(commit, run, world_size, right)
        if best is not None:
            found.append(best)
    return found, manifests


def _is_right(folder: Path, manifest: Any, rank: int, moment: Moment, kind: Kind, world_size: int) -> bool:
    try:
        if (folder / manifest["files"][str(rank)]).read_bytes() != image_of(moment, kind, rank, world_size):
            return False
        digest = manifest["ranks"][str(rank)]["plan"]
        document = json.loads((folder / f"plan-{digest[:32]}.json").read_bytes())
    except (OSError, ValueError):
        return False
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest() == digest


def _signed(data: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(data)
        signature = document.pop("signature")
    except (ValueError, KeyError, AttributeError, TypeError):
        return None
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    right = hmac.new(SECRET, text.encode(), hashlib.sha256).hexdigest()
    return document if signature == right else None


def claims(root: Path) -> dict[int, str]:
    """Generations that have saved something in the store, and of which run they are."""
    saved = {int(match[2]) for path in root.glob("step-*/manifest.json") if (match := _FOLDER.match(path.parent.name))}
    found = {}
    for path in root.glob("generations/*.json"):
        with suppress(FileNotFoundError):  # deleted since
            if int(path.stem) in saved:
                found[int(path.stem)] = str(json.loads(path.read_bytes())["run"])
    return found


class Copies:
    """Every copy that is left of the current run's commits, and the store's."""

    def __init__(self, run: Run, runs: list[Run], kind: Kind, root: Path | None, flipped: Collection[Slot]) -> None:
        self._run, self._runs, self._kind, self._root, self._flipped = run, runs, kind, root, flipped
        self.intact: defaultdict[Commit, set[int]] = defaultdict(set)
        """Ranks whose state at a commit is in some memory, byte for byte."""
        self.stored: list[Stored] = []
        self.manifests = 0

    def look(self, nodes: Mapping[int, Node], workers: Mapping[int, Worker]) -> Copies:
        """Take in all there is now."""
        for node in nodes.values():
            for name, owner, slot, data in raw_slots(node):
                commit = slot.step, slot.generation
                if commit in self._run.commits and data == self.image(commit, owner):
                    self.intact[commit].add(owner)
                else:
                    known = slot.promised or any(slot is one for one in self._flipped)
                    assert known, f"the {name} snapshot {commit} of rank {owner} on node {node.number} is torn"
        for worker in workers.values():
            if worker.whole is not None and not worker.dead:
                step, generation = worker.whole.step, int(worker.whole.save_id[1:].partition("-")[0])
                self.intact[step, generation].add(worker.rank)
        if self._root is not None:
            self.stored, self.manifests = read_store(self._root, self._runs, self._kind)
        return self

    def image(self, commit: Commit, owner: int) -> bytes:
        """The bytes that a rank's snapshot of a commit has when it is right."""
        return image_of(self._run.commits[commit], self._kind, owner, self._run.world_size)

    def starts(self) -> dict[int, int]:
        """Where generations began that anybody can still know of: this run's, and those that claimed the store."""
        on_disk = claims(self._root) if self._root is not None else {}
        of = {run.name: run for run in self._runs}
        claimed = {g: of[name].began[g] for g, name in on_disk.items() if g in of[name].began}
        saved = {one.commit[1]: one.run.began[one.commit[1]] for one in self.stored}
        return saved | claimed | self._run.began

    def possible(self, generation: int) -> set[Commit]:
        """Commits that every rank of this generation can have now, whatever else is damaged."""
        began = {g: step for g, step in self.starts().items() if g < generation}
        everyone = set(range(self._run.world_size))
        found = set()
        stored = {one.commit: one for one in self.stored}
        first = min(self._run.began, default=generation)
        for commit in {*self.intact, *stored}:
            if given_up(commit, began):
                continue
            if commit not in self.intact and stored[commit].run is not self._run and commit[1] >= first:
                continue  # of a run that went on beside this one, unknown to it
            ranks = set(self.intact.get(commit, ()))
            serves_all = bool(ranks) and (
                self._kind.sharing == "same" or (self._kind.sharing == "alike" and len(ranks) > 1 and self._agree())
            )
            if (one := stored.get(commit)) is not None:
                if one.world_size == self._run.world_size:
                    ranks |= one.whole
                elif one.whole == set(range(one.world_size)):
                    ranks = everyone
            if serves_all or ranks == everyone:
                found.add(commit)
        return found

    def _agree(self) -> bool:
        return not self._kind.differ


def raw_slots(node: Node) -> Iterator[tuple[str, int, Slot, bytes]]:
    """Every slot of a node that is said to hold a whole snapshot, with the bytes that are in it."""
    for name, regions in (("own", node.memory.own), ("replica", node.memory.replicas)):
        with regions._changed:
            for owner, each in regions._regions.items():
                for region in each:
                    for index, slot in enumerate(region.slots):
                        if slot.sealed:
                            start = index * region.slot_bytes
                            data = bytes(region.memory[start : start + int(slot.manifest["nbytes"])])
                            yield name, owner, slot, data


def copying_is_uneven(nodes: Iterable[Node], ranks: set[int], since: Commit | None) -> bool:
    """Whether some ranks have replicas of something newer than `since`, and others not: those that have let go of what
    they kept, and the loss of one that has not leaves neither whole."""
    if since is None:
        return False
    done: defaultdict[Commit, set[int]] = defaultdict(set)
    for node in nodes:
        for name, owner, slot, _ in raw_slots(node):
            if name == "own" and slot.state >= State.REPLICATED and (slot.generation, slot.step) > since[::-1]:
                done[slot.step, slot.generation].add(owner)
    return bool(done) and ranks not in done.values()


class Promises:
    """Commits that must be left in the nodes' own memory, whatever dies but the node.

    Two slots are enough for this: what a rank sealed last is never overwritten, and what it sealed
    before that is there until it begins another save.
    """

    def __init__(self) -> None:
        self._sealed: dict[int, list[Commit]] = {}
        self._losses = 0
        self.protected: Commit | None = None
        """What had replicas everywhere when the copying last came to rest: the loss of one node leaves it."""

    def begins(self, rank: int) -> None:
        self._sealed[rank] = self._sealed.get(rank, [])[-1:]

    def sealed(self, rank: int, commit: Commit) -> None:
        if commit not in (known := self._sealed.setdefault(rank, [])):
            known.append(commit)

    def fence(self, generation: int, step: int) -> None:
        """What was made after the step that a generation begins with is forgotten."""
        for rank, known in self._sealed.items():
            self._sealed[rank] = [c for c in known if not (c[0] > step and c[1] < generation)]
        if self.protected is not None and self.protected[0] > step:
            self.protected = None

    def damaged(self, rank: int, commit: Commit) -> None:
        """A copy in the rank's own memory is no good any more."""
        self._sealed[rank] = [c for c in self._sealed.get(rank, []) if c != commit]

    def lost(self, ranks: set[int]) -> None:
        """A node is gone. Another one before the copying came to rest again may take what is protected."""
        for rank in ranks:
            self._sealed[rank] = []
        self._losses += 1
        if self._losses > 1:
            self.protected = None

    def rested(self, protected: Commit | None) -> None:
        """The copying has come to rest."""
        self.protected, self._losses = protected, 0

    def kept(self, kind: Kind, world_size: int) -> set[Commit]:
        """Commits that every rank must find in memory."""
        each = [set(self._sealed.get(rank, [])) for rank in range(world_size)]
        if kind.sharing == "same":
            return set.union(*each)
        return set.intersection(*each)

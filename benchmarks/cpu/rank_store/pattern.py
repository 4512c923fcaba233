"""What torch's groups of gloo ask of their store, with connections that are made when they are first used.

A rank sets where it is reached when a group is made. Its first all-reduce waits for, and gets, the same of its
neighbours in a ring of the group's members. `test_counted.py` compares with what real groups ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Mesh = tuple[int, int, int]
"""Replicas, stages of a pipeline, ranks that share a tensor."""
_BYTES = 154
"""Of the value that gloo sets."""
VALUE = bytes(range(_BYTES))


@dataclass(frozen=True, slots=True)
class Group:
    """One process group, as one of its ranks sees it."""

    name: str
    """As torch numbers groups; empty: the default group."""
    members: Sequence[int]
    place: int
    """Of this rank among them."""

    @property
    def own_key(self) -> str:
        return self._key(self.place)

    @property
    def neighbour_keys(self) -> list[str]:
        """Of the next one in the ring, and the one before."""
        places = (self.place + 1) % len(self.members), (self.place - 1) % len(self.members)
        return [self._key(place) for place in dict.fromkeys(places) if place != self.place]

    def _key(self, place: int) -> str:
        return f"0//{self.name}//cpu//0/{place}" if self.name else f"0//cpu//0/{place}"


def default_group(rank: int, size: int) -> Group:
    return Group("", range(size), rank)


def mesh_groups(rank: int, mesh: Mesh) -> list[Group]:
    """Those that a device mesh makes: for each of its dimensions, one of the ranks that differ in it alone."""
    replicas, stages, width = mesh
    sizes, strides = mesh, (stages * width, width, 1)
    found, number = [], 1
    for size, stride in zip(sizes, strides, strict=True):
        first = rank - (rank // stride) % size * stride
        members = range(first, first + size * stride, stride)
        block, within = divmod(first, size * stride)
        found.append(Group(str(number + block * stride + within), members, (rank - first) // stride))
        number += replicas * stages * width // size
    return found


def mesh_of(ranks: int, width: int) -> Mesh:
    """A mesh of so many ranks: `width` of them share a tensor, and there are up to four stages."""
    stages = next(stages for stages in (4, 2, 1) if ranks % (stages * width) == 0)
    return ranks // (stages * width), stages, width

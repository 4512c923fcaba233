"""Messages with something wrong in them, as frames say them."""

from __future__ import annotations

import json
import os
import socket
import sys
from random import Random
from typing import Any

import declared_examples

from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.declared import Kinds, encode, with_version


def messages(kinds: Kinds[Any], count: int, tag: str = "type") -> list[dict[str, Any]]:
    """`count` of these kinds, each of which its reader refuses; `tag`: the field that names the kind."""
    random, found = Random(20261124), []
    while len(found) < count:
        right = encode(declared_examples.example(random.choice(list(kinds)), random))
        wrong = json.loads(json.dumps(declared_examples.spoiled(right, tag, random)))
        try:
            kinds.decode(wrong)
        except wire.WireError:
            found.append(wrong)
    return found


def main() -> None:
    """`damaged.py SOCKET RANK COUNT`: a worker that says COUNT damaged messages to its agent, and one that is right."""
    path, rank, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        wire.send(sock, with_version(encode(c.WorkerHandshake(rank=rank, pid=os.getpid()))))
        for message in [*messages(c.WORKER_REPORTS, count), encode(c.Finished(digest="right"))]:
            wire.send(sock, message)


if __name__ == "__main__":
    main()

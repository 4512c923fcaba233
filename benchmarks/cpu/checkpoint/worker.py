"""One rank of one system, and its host: does what a line of JSON asks, answers with a line of JSON.

python -m checkpoint.worker '{"system": ..., "role": "rank", "rank": 0, ...}'
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from hyperpod_ext.processes import die_with_parent

Answer = dict[str, Any]
MOST_STEPS = 80
"""Of a window that waits for the background."""


def main() -> None:
    settings = json.loads(sys.argv[1])
    die_with_parent(settings["parent"])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a system prints is not an answer
    try:
        (_host if settings["role"] == "host" else _rank)(settings, answers)
    except Exception as error:
        _tell(answers, _failure(error))
        sys.exit(1)
    finally:
        sys.stderr.flush()
    os._exit(0)  # whatever threads a system has left


def _tell(answers: TextIO, answer: Answer) -> None:
    answers.write(json.dumps(answer) + "\n")


def _failure(error: Exception) -> Answer:
    traceback.print_exc()
    lines = str(error).strip().splitlines() or [""]
    return {"error": f"{type(error).__name__}: {lines[0][:300]}"}


def _serve(answers: TextIO, calls: dict[str, Callable[..., Answer]]) -> None:
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = calls[request.pop("op")](**request)
        except Exception as error:
            answer = _failure(error)
        _tell(answers, answer)


def _adapter(name: str) -> Any:
    module, _, kind = name.partition(":")
    return getattr(importlib.import_module(f"checkpoint.adapters.{module}"), kind)


def _place(settings: dict[str, Any]) -> Any:
    from checkpoint.adapters import Place

    return Place(**(settings["place"] | {"folder": Path(settings["place"]["folder"])}))


def _host(settings: dict[str, Any], answers: TextIO) -> None:
    from checkpoint.processes import cpu_of

    adapter, place = _adapter(settings["adapter"]), _place(settings)
    with adapter.hosting(place) as host:
        pids = [os.getpid(), *host.pids]

        def lose(rank: int) -> Answer:
            adapter.lose_memory_of(place, host, rank)
            return {}

        _tell(answers, {"told": host.told, "pids": pids})
        _serve(answers, {"lose": lose, "cpu": lambda: {"seconds": sum(map(cpu_of, pids))}})


def _rank(settings: dict[str, Any], answers: TextIO) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    place = _place(settings)
    dist.init_process_group("gloo", rank=place.rank, world_size=place.world_size)
    rank = Rank(settings["kind"], int(settings["nbytes"]), place, _adapter(settings["adapter"]))
    rank.answers = answers
    _tell(answers, rank.describe())
    _serve(answers, {name: getattr(rank, name) for name in SAVING + TRAINING})
    rank.adapter.close()


SAVING = ("prepare", "fill", "floor", "save", "safe", "restore", "receive", "drain")
TRAINING = ("calibrate", "train", "replicate", "beside", "follow", "copy_one")


class Rank:
    """The state, the system, and each thing that can be asked of them."""

    answers: TextIO

    def __init__(self, kind: str, nbytes: int, place: Any, adapter: Any) -> None:
        from checkpoint import state as states
        from checkpoint.timing import Floor

        self.states, self.place = states, place
        self.model, self.optimizer = states.build(kind, nbytes, place.world_size)
        self.state = states.state_of(self.model, self.optimizer)
        self.floor_copy = Floor(states.locals_of(self.state))
        self.adapter = adapter(place)
        self.tokens: Any = None

    def describe(self) -> Answer:
        from torch.distributed.tensor import DTensor

        tensors = list(self.states.leaves(self.state))
        dtensors = sum(isinstance(tensor, DTensor) for tensor in tensors)
        nbytes = self.states.nbytes_of(self.state)
        return {"nbytes": nbytes, "tensors": len(tensors), "dtensors": dtensors, "pid": os.getpid()}

    def prepare(self) -> Answer:
        self.floor_copy.measure()
        self.adapter.prepare(self.state)
        return {}

    def fill(self, step: int) -> Answer:
        self.states.fill(self.state, step, self.place.rank)
        return {}

    def floor(self, repeat: int = 3) -> Answer:
        """The copy that everything is held against: median of a few, in this process, now."""
        self._meet()
        return self.floor_alone(repeat)

    def floor_alone(self, repeat: int = 3) -> Answer:
        found = [self.floor_copy.measure() for _ in range(repeat)]
        return {clock: median(each[clock] for each in found) for clock in ("wall", "adj")}

    def save(self, step: int) -> Answer:
        """One save, with the floor before it; then all of it to its end."""
        from checkpoint.timing import Stopwatch

        floor = self.floor()
        self._meet()
        with Stopwatch() as blocked:
            if self.place.overlapped:
                self.adapter.begin(self.state, step)
                self.adapter.wait_staged()
            else:
                self.adapter.save(self.state, step)
        self.adapter.wait_safe()
        done = time.monotonic() - blocked.start
        self.adapter.flush()
        return {"floor": floor, "blocked": blocked.to_json(), "done": done}

    def safe(self, step: int) -> Answer:
        """Save, and tell the moment the system says it is safe; to be killed right then."""
        floor = self.floor()
        self._meet()
        start = time.monotonic()
        self.adapter.save(self.state, step)
        self.adapter.wait_safe()
        return {"floor": floor, "start": start, "safe": time.monotonic(), "step": step}

    def restore(self, step: int, last: int | None = None) -> Answer:
        """Into the existing tensors of a fresh process; then whether they are what was saved at `step`.

        All ranks at once; or rank `last` when the others have done it, and do nothing any more.
        """
        from checkpoint.timing import Stopwatch

        floor = self.floor()
        self._meet()
        if self.place.rank == last:
            self._meet()
        with Stopwatch() as clock:
            found = self.adapter.restore(self.state)
        if last is not None:
            self._meet()
            if self.place.rank != last:
                self._meet()
        equal = self.states.is_state(self.state, found, self.place.rank)
        return {"floor": floor, "restore": clock.to_json(), "found": found, "equal": equal and found == step}

    def receive(self, port: int, streams: int) -> Answer:
        """As many bytes as the state over `streams` sockets into touched memory: the floor of a restore from a peer."""
        import socket

        import torch

        target = memoryview(torch.ones(self.describe()["nbytes"], dtype=torch.uint8).numpy())
        share = -(-len(target) // streams)

        def take(part: int) -> None:
            view = target[part * share : (part + 1) * share]
            with socket.create_connection(("127.0.0.1", port)) as line:
                line.sendall(len(view).to_bytes(8, "little"))
                have = 0
                while have < len(view):
                    have += line.recv_into(view[have:])

        start = time.monotonic()
        threads = [threading.Thread(target=take, args=(part,)) for part in range(streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"wall": time.monotonic() - start}

    def calibrate(self, least_ratio: float) -> Answer:
        """How many tokens a step takes so that forward and backward last `least_ratio` times the copy."""
        floor = self.floor_alone()["adj"]
        for tokens in (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512):
            found = self.train(steps=4, tokens=tokens)["compute"]
            if median(found) >= least_ratio * floor:
                break
        return {"tokens": tokens}

    def train(
        self,
        steps: int,
        tokens: int,
        *,
        save_steps: list[int] | None = None,
        first_save: int = 0,
        until_done: bool = False,
        flush: bool = True,
        on_save: Callable[[], None] = lambda: None,
        on_staged: Callable[[], None] = lambda: None,
        done: Callable[[], bool] | None = None,
    ) -> Answer:
        """Real steps; `save_steps` are those that begin with a save, which is staged before the optimizer's step.

        With `until_done` the steps go on until nothing of the save is left in the background.
        """
        from checkpoint.timing import Stopwatch

        if self.tokens is None or self.tokens.numel() != tokens:
            import torch

            self.tokens = torch.randint(self.states.VOCABULARY, (1, tokens))
        saves = set(save_steps or ())
        done = done or (lambda: not self.adapter.busy())
        told: dict[str, list[float]] = {"wall": [], "adj": [], "compute": [], "blocked": []}
        while len(told["wall"]) < steps or (until_done and len(told["wall"]) < MOST_STEPS and not done()):
            begin, staged = Stopwatch(), Stopwatch()
            with Stopwatch() as step:
                number = len(told["wall"])
                if number in saves:
                    with begin:
                        self.adapter.begin(self.state, first_save + number)
                    on_save()
                with Stopwatch() as compute:
                    self._forward_and_backward()
                if number in saves:
                    with staged:
                        self.adapter.wait_staged()
                    on_staged()
                self.optimizer.step()
                if number not in saves:
                    self.adapter.stepped()
            told["wall"].append(step.wall)
            told["adj"].append(step.adj)
            told["compute"].append(compute.adj)
            told["blocked"].append(begin.adj + staged.adj)
        whole = not until_done or done()
        if flush:
            self.adapter.flush()
        return {**told, "done": whole}

    def _forward_and_backward(self) -> None:
        import torch.nn.functional as F

        self.optimizer.zero_grad(set_to_none=False)
        scores = self.model(self.tokens)
        F.cross_entropy(scores.flatten(0, 1), self.tokens.flatten()).backward()

    def replicate(self, step: int, tokens: int, steps: int, repeats: int, *, alone: bool) -> Answer:
        """Training without a pause: saves with copies on other nodes, each after some steps without one, and, with
        `alone`, followed by one that is not copied: what each cost, and when the copies were there."""
        floor = self.floor()
        plain = [self.train(steps, tokens, flush=False)]
        windows = []
        for number in range(step, step + 2 * repeats, 2):
            self._meet()  # with `follow` of the other rank
            copied = self._copied(number, tokens, steps)
            plain.append(self.train(steps, tokens, flush=False))
            windows.append({"copied": copied, "plain": plain[-2:]})
            if alone:
                windows[-1]["alone"] = self.train(steps, tokens, save_steps=[0], first_save=number + 1, flush=False)
                plain.append(self.train(steps, tokens, flush=False))
                windows[-1]["plain"] = plain[-3:]
        self.adapter.flush()
        return {"floor": floor, "windows": windows}

    def _copied(self, step: int, tokens: int, steps: int) -> Answer:
        moments: list[float] = []
        staged: list[float] = []

        def watch() -> None:
            self.adapter.wait_replicated()
            moments.append(time.monotonic() - start)

        watcher = threading.Thread(target=watch)
        start = time.monotonic()
        told = self.train(
            steps,
            tokens,
            save_steps=[0],
            first_save=step,
            until_done=True,
            flush=False,
            on_save=watcher.start,
            on_staged=lambda: staged.append(time.monotonic() - start),
            done=lambda: bool(moments),
        )
        watcher.join()
        return {"replicated": moments[0], "staged": staged[0], **told}

    def beside(self, port: int, tokens: int, steps: int) -> Answer:
        """Training while something goes on elsewhere: what is at `port` is told when it begins, and tells the end."""
        import socket

        floor = self.floor_alone()
        ended = threading.Event()

        def watch() -> None:
            line.sendall(b"\1")
            line.recv(1)
            ended.set()

        watcher = threading.Thread(target=watch)
        with socket.create_connection(("127.0.0.1", port)) as line:
            watcher.start()
            told = self.train(steps, tokens, until_done=True, done=ended.is_set)
            watcher.join()
        return {"floor": floor, **told}

    def follow(self, step: int, repeats: int) -> Answer:
        """This rank's part in `replicate` of the other rank: its own saves, and no training."""
        self.floor()
        for number in range(step, step + 2 * repeats, 2):
            self._meet()
            self.copy_one(number)
        return {}

    def copy_one(self, step: int) -> Answer:
        """A save with copies on other nodes, awaited."""
        self.adapter.begin(self.state, step)
        self.adapter.wait_staged()
        self.adapter.wait_replicated()
        self.adapter.flush()
        return {}

    def drain(self, step: int) -> Answer:
        """Save, then have it in S3. Time counts from the seal on, as with it the drain begins."""
        self.adapter.save(self.state, step)
        cpu = time.process_time()
        self.adapter.wait_sealed()
        start = time.monotonic()
        self.adapter.drain()
        return {"wall": time.monotonic() - start, "cpu": time.process_time() - cpu}

    def _meet(self) -> None:
        import torch.distributed as dist

        if self.place.world_size > 1:
            dist.barrier()


if __name__ == "__main__":
    main()

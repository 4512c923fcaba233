"""A DDP script without a line of ours: it saves every five steps, and resumes from its newest checkpoint.

HPX_TEST_SAVES: `file` (torch.save), `stream` (through open files), `each` (a file of each rank), `each-stream`,
`folder` (torch.distributed.checkpoint), `async-folder`, `one-folder` (overwritten each time), `nowhere` (a folder that
does not exist), `pickled` (with an object of a class) or `ignored` (it saves, and never loads).
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import fsspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

STEPS, EVERY, STARTED = 24, 5, 0
SAVES, FOLDER = os.environ.get("HPX_TEST_SAVES", "file"), Path(os.environ["HPX_TEST_FOLDER"])


def strike(step: int, rank: int) -> None:
    """Raise once, or each time, in a step; or wait in it until a kill has struck."""
    if (place := os.environ.get("HPX_TEST_RAISES")) and place == f"{rank}@{step}":
        mark = FOLDER / "raised"
        if os.environ.get("HPX_TEST_ALWAYS") or not mark.exists():
            mark.touch()
            raise ValueError(f"no luck in step {step}")
    if os.environ.get("HPX_TEST_EVALUATES") == f"{rank}@{step}":
        time.sleep(3.0)  # longer than ten steps, and without a collective
    # not a mark in a file: a kill after the step before may come before the mark is made
    if os.environ.get("HPX_TEST_HOLD") == f"{rank}@{step}" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        threading.Event().wait()


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7 + rank)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
    # its folders are loaded in place, for which AdamW's state would have to be made first
    kind = torch.optim.SGD if SAVES.endswith("folder") else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer}
    begin = load(state)
    parallel = DistributedDataParallel(model)
    for step in range(begin + 1, STEPS + 1):
        strike(step, rank)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step * world_size + rank))
        loss = (parallel(x) - x.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % EVERY == 0:
            save(state, step, rank)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    (FOLDER / f"digest-{rank}").write_text(digest)
    dist.destroy_process_group()
    sys.exit(0)


class Settings:
    """An object that a file has only as pickled code."""


class CutPlan(dcp.DefaultSavePlanner):
    """Kills its process, once, when another rank has written its file of the checkpoint."""

    def finish_plan(self, central_plan: dcp.SavePlan) -> dcp.SavePlan:
        plan = super().finish_plan(central_plan)
        if not (FOLDER / "cut").exists():
            while not any(file.stat().st_mtime_ns > STARTED for file in FOLDER.glob("*newest*/__0_0.distcp")):
                time.sleep(0.01)
            Cut().__reduce__()
        return plan


class Cut:
    """Kills its process, once, when it is written."""

    def __reduce__(self) -> tuple[type[int], tuple[()]]:
        if not (mark := FOLDER / "cut").exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return int, ()


def save(state: dict[str, object], step: int, rank: int) -> None:
    values = {name: one.state_dict() for name, one in state.items()}
    if SAVES.endswith("folder"):
        name = "newest" if SAVES == "one-folder" else f"step-{step}"
        call = dcp.async_save if SAVES == "async-folder" else dcp.save
        planner = None
        if os.environ.get("HPX_TEST_CUT") == f"{rank}@{step}":
            global STARTED
            STARTED, planner = time.time_ns(), CutPlan()
        saved = call({**values, "step": torch.tensor(step)}, checkpoint_id=str(FOLDER / name), planner=planner)
        if SAVES == "async-folder":
            saved.result()
    elif SAVES.startswith("each"):
        if os.environ.get("HPX_TEST_CUT") == f"{rank}@{step}" and not (FOLDER / "cut").exists():
            while other_step(1 - rank) < step:
                time.sleep(0.01)
            Cut().__reduce__()
        write({**values, "step": step}, file_of(rank))
    elif rank == 0:
        cut = {"cut": Cut()} if os.environ.get("HPX_TEST_CUT") == str(step) else {}
        cut |= {"settings": Settings()} if SAVES == "pickled" else {}
        write({**values, "step": step, **cut}, file_of(rank))


def write(values: dict[str, object], file: Path) -> None:
    if SAVES.endswith("stream"):
        with file.open("wb") as stream:
            torch.save(values, stream)
    else:
        torch.save(values, file)


def other_step(rank: int) -> int:
    """Step in the file of another rank, which may be writing it; 0 if it cannot be read yet."""
    try:
        return int(torch.serialization.load(file_of(rank), weights_only=True)["step"])
    except (OSError, RuntimeError, EOFError):
        return 0


def file_of(rank: int) -> Path:
    folder = FOLDER / "missing" if SAVES == "nowhere" else FOLDER
    return folder / (f"newest-{rank}.pt" if SAVES.startswith("each") else "newest.pt")


def load(state: dict[str, object]) -> int:
    folders = [each for each in FOLDER.glob("*") if (each / ".metadata").exists()]
    if SAVES.endswith("folder") and folders:
        newest = max(folders, key=lambda folder: int(folder.name.removeprefix("step-").replace("newest", "0")))
        values = {name: one.state_dict() for name, one in state.items()}
        dcp.load({**values, "step": (step := torch.tensor(0))}, checkpoint_id=str(newest))
        for name, one in state.items():
            one.load_state_dict(values[name])
        return int(step)
    if SAVES != "ignored" and (file := file_of(dist.get_rank())).exists():
        if SAVES.endswith("stream"):
            with fsspec.open(str(file)) as stream:
                values = torch.load(stream, weights_only=True)
        else:
            values = torch.load(file, weights_only=not os.environ.get("HPX_TEST_UNPICKLES"))
        for name, one in state.items():
            one.load_state_dict(values[name])
        return int(values["step"])
    return 0


if __name__ == "__main__":
    main()

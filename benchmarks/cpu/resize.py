"""Seconds without a step when the number of nodes changes: in place, and by saving, ending and starting again.

`python benchmarks/cpu/resize.py`. Both ways in one run, one after the other on the same machine: 2 -> 4 -> 3 -> 1 -> 4
processes, each a node of its own in place; the other way is torchrun with DCP, on one node. Both pauses are from the
end of the last step before to the beginning of the first one after.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
WORLDS = (2, 4, 3, 1, 4)
LIMIT_S, LIMIT_SHARE = 1.5, 1 / 8


def in_place(parallel: str, width: int, folder: Path, *, cold: bool = False) -> list[dict]:
    """Each resize, as the report tells it. `cold`: nodes do their own imports, as on machines that run nothing yet."""
    from conftest import Job
    from resizing import ELASTIC, Resizable, settings

    env = {"HPX_TEST_STEPS": "600", "HPX_TEST_SECONDS": "0.3", "HPX_TEST_PARALLEL": parallel}
    env["HPX_TEST_WIDTH"] = str(width)
    job = Job(folder, nodes=WORLDS[0], workers_per_node=1, script=ELASTIC, settings=settings(), env=env, cold=cold)
    running = Resizable(job).start()
    job.until("step", step=3)
    for nodes in WORLDS[1:]:
        running.resize(nodes)
    report = running.finish()
    assert report["state"] == "succeeded", report["error"]
    return list(report["resizes"])


def start_again(parallel: str, width: int, folder: Path) -> list[float]:
    """Seconds from the last step of one start to the first of the next."""
    folder.mkdir()
    pauses, ended = [], 0.0
    for world_size in WORLDS:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
        command += [str(HERE / "resize_restart.py"), parallel, str(width), "5", str(folder)]
        for file in folder.glob("times-*.json"):
            file.unlink()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        times = [json.loads(file.read_text()) for file in folder.glob("times-*.json")]
        if len(times) < world_size:  # gloo may abort a process that ends before its peers; what it did is done by then
            sys.exit(done.stderr)
        pauses.append(max(time["began"] for time in times) - ended)
        ended = max(time["ended"] for time in times)
    shutil.rmtree(folder)
    return pauses[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parallel", nargs="+", default=["ddp", "fsdp2", "hsdp"])
    parser.add_argument("--in-place", action="store_true", help="this way alone, with the seconds before the pause")
    parser.add_argument("--width", type=int, default=4096, help="of the model; 4096 makes 1 MiB of state")
    arguments = parser.parse_args()
    sys.path[:0] = [str(HERE.parents[1] / "tests" / "faults"), str(HERE.parents[1] / "tests" / "support")]
    failed = False
    sys.stdout.write(f"{'':8}{'nodes':>8}{'in place':>10}{'again':>10}{'share':>8}{'moved':>10}{'local':>8}\n")
    with tempfile.TemporaryDirectory(prefix="hpx-") as scratch:
        for parallel in arguments.parallel:
            folder = Path(scratch) / parallel
            resizes = in_place(parallel, arguments.width, folder, cold=arguments.in_place)
            if arguments.in_place:
                for resize in resizes:
                    seconds = {name: round(its, 2) for name, its in resize["phases"].items()}
                    sys.stdout.write(
                        f"{parallel:8}{resize['of']}->{resize['nodes']} {resize['pause_s']:.3f} s {seconds}\n"
                    )
                continue
            others = start_again(parallel, arguments.width, Path(scratch) / f"{parallel}-again")
            shares = []
            for resize, other in zip(resizes, others, strict=True):
                shares.append(resize["pause_s"] / other)
                failed |= resize["pause_s"] > LIMIT_S or shares[-1] > LIMIT_SHARE or not resize["pids_kept"]
                nodes, moved = f"{resize['of']}->{resize['nodes']}", f"{resize['bytes_moved'] / (1 << 20):.2f}M"
                figures = f"{resize['pause_s']:>9.3f}s{other:>9.2f}s{shares[-1]:>8.3f}{moved:>10}"
                sys.stdout.write(f"{parallel:8}{nodes:>8}{figures}{resize['local_share']:>8.2f}\n")
            sys.stdout.write(f"{parallel:8}{'median':>8}{'':20}{statistics.median(shares):>8.3f}\n")
    if failed:
        sys.exit(f"a pause above {LIMIT_S} s or above {LIMIT_SHARE} of the other way, or a process that was not kept")


if __name__ == "__main__":
    main()

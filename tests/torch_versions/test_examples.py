"""The least that is asked of a version of torch: all of the runtime imports, and both kinds of parallelism go on after
a kill -9 as if nothing had been. `make test-torch TORCH=2.15.0` runs this with that version.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import fsdp2
import pytest
import torch
from command import hp_ext
from local_place import LocalPlace

import hyperpod_ext.runtime

pytestmark = [pytest.mark.torch_versions, pytest.mark.timeout(1800)]

EXAMPLES = {"01-local": "DDP", "03-sharded": "FSDP2, HSDP"}


def test_every_module_of_the_runtime_imports() -> None:
    """But those that need a library which is not installed here."""
    left_out: dict[str, str] = {}
    package = Path(hyperpod_ext.runtime.__path__[0])
    for file in sorted(package.rglob("*.py")):
        if file.stem not in ("__main__", "__init__"):
            name = ".".join(("hyperpod_ext.runtime", *file.relative_to(package).with_suffix("").parts))
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as missing:
                library = (missing.name or "").partition(".")[0]
                if library in ("", "hyperpod_ext", "torch"):
                    raise
                left_out[name] = library
    print(f"\ntorch {torch.__version__}: the runtime imports; not installed: {sorted(set(left_out.values()))}")


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_killed_worker_changes_nothing(root: Path, place: LocalPlace, name: str) -> None:
    if "FSDP2" in EXAMPLES[name]:
        fsdp2.skip_without_cpus()
    spec = root / "examples" / name / "job.yaml"
    done = hp_ext(
        *("create-job", "-f", spec, "--target", "local", "--wait", "--kill", "rank=2@step=13", "-o", "json"),
        timeout_s=500.0,
    )
    assert done.code == 0, done.stderr
    result = done.json
    found = {key: result[key] for key in ("state", "loss_equal", "weights_equal", "steps", "steps_lost")}
    print(f"\ntorch {torch.__version__}, {name} ({EXAMPLES[name]}), rank 2 killed in step 13: {found}")
    assert found == {"state": "succeeded", "loss_equal": True, "weights_equal": True, "steps": 40, "steps_lost": 0}
    (recovery,) = result["recoveries"]
    assert (recovery["fault"]["rank"], recovery["fault"]["step"]) == (2, 13)
    assert recovery["survivor_pids_kept"], "the other ranks kept their processes, with model and optimizer"

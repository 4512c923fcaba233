"""Weights after 6 steps of AdamW with dropout, clipping and uneven shares: one hash for any number of ranks.

After 16, in the middle of a second epoch, and each number of ranks alone, in `make test-thorough`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import warm_code
import whole_run

WORLDS = Path(__file__).with_name("worlds.py")

pytestmark = [pytest.mark.slow]


def hashes_of(folder: Path, *kinds: str, steps: int = 6, sizes: str = "1,4") -> dict[str, dict[str, str]]:
    """By kind and history: each size alone, and one of 2, 3 and 1 in turn. All ranks have the same."""
    program = (
        f"import os, sys\nos.environ.update(HPX_TEST_STEPS='{steps}', HPX_TEST_SIZES='{sizes}')\n"
        f"sys.path.insert(0, {str(WORLDS.parent)!r})\nsys.argv[1:] = {[str(folder), *kinds]!r}\n"
        "import worlds\nworlds.main()\n"
    )
    done = warm_code.run(program, timeout_s=1000.0)  # torch has been imported there, what optimizers import late too
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, str]] = json.loads((folder / "hashes-0.json").read_text())
    for rank in range(1, 4):
        for kind, runs in json.loads((folder / f"hashes-{rank}.json").read_text()).items():
            assert all(found[kind][name] == digest for name, digest in runs.items()), "ranks differ"
    return found


@pytest.fixture(scope="module")
def hashes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    folder = tmp_path_factory.mktemp("worlds")
    found: dict[str, dict[str, str]] = whole_run.once(
        "worlds", lambda: hashes_of(folder, "replicated", "plain", "sharded")
    )
    return found


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_weights_are_the_same_bits_for_every_world_size_and_history(hashes, kind):
    runs = hashes[kind]
    assert len(runs) == 3
    assert set(runs.values()) == {runs["1"]}


def test_sums_in_float32_differ(hashes):
    """So the test above can fail."""
    assert len(set(hashes["plain"].values())) == 3


@pytest.mark.thorough
def test_replicas_of_shards_and_a_second_epoch_do_not_matter_either(tmp_path):
    found = hashes_of(tmp_path, "replicated", "sharded", "hybrid", steps=16, sizes="1,2,3,4")
    assert {kind: len(runs) for kind, runs in found.items()} == {"replicated": 5, "sharded": 5, "hybrid": 4}
    assert set(found["replicated"].values()) == {found["replicated"]["1"]}
    assert {digest for kind in ("sharded", "hybrid") for digest in found[kind].values()} == {found["sharded"]["1"]}

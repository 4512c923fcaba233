"""Weights of examples/20-trainer next to Hugging Face's own models: the same logits, and the same bits after a copy."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from integrations_env import hp_ext

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(1200)]


def test_weights_of_hugging_face_give_the_same_logits() -> None:
    command = [hp_ext().with_name("python"), Path(__file__).with_name("hugging_face.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found.pop("four ranks llama"), found.pop("four ranks mixtral")) == (True, True)
    assert found.keys() == {
        *("from llama", "from tied", "from llama 3.1", "from mixtral"),
        *("to llama-tiny", "to moe-tiny"),
    }
    assert max(found.values()) < 1e-4, found

"""HyperPodPyTorchJobs as rendered, read with the model of AWS's own `hyp`: one that it cannot parse hides all."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sdk_venvs import python_of

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.jobs.contract.yaml_text import read_all
from hyperpod_ext.jobs.plan import find_warnings, make_plan

pytestmark = [pytest.mark.sdks, pytest.mark.timeout(1800)]

MODEL = "sagemaker/hyperpod/training/config/hyperpod_pytorch_job_unified_config.py"
EXAMPLES = sorted((Path(__file__).resolve().parents[3] / "examples" / "04-hyperpod-eks").glob("rendered/*/job.yaml"))
LEAST = {"name": "a", "script": "train.py", "image": "repo/train:1", "nodes": 2}
VOLUMES = [
    {"kind": "claim", "path": "/a", "claim": "c", "sub_path": "x"},
    {"kind": "host", "path": "/b", "host_path": "/b"},
    {"kind": "scratch", "path": "/c", "size_mib": 5, "in_memory": True},
    {"kind": "config", "path": "/d", "config_map": "x"},
    {"kind": "secret", "path": "/e", "secret": "s"},
]
CASES: dict[str, dict[str, Any]] = {
    "least": {},
    "ours": {"kubernetes": {"launcher": "ours"}},
    "volumes": {"volumes": VOLUMES},
    "scheduling": {
        "scheduling": {
            "tolerations": [{"key": "a", "operator": "Equal", "value": "b", "effect": "NoExecute", "seconds": 5}],
            "queue": "q",
            "priority": "p",
            "topology": {"level": "topology.k8s.aws/network-node-layer-3"},
        }
    },
    "secrets": {"kubernetes": {"secret_env": [{"name": "A", "secret": "s", "key": "k"}], "pull_secrets": ["x"]}},
    "elastic": {"elastic": {"min_nodes": 1, "max_nodes": 4}},
    "groups": {
        "nodes": 3,
        "scheduling": {"queue": "q"},
        "node_groups": [{"name": "a", "nodes": 1}, {"name": "b", "nodes": 2, "spares": 1}],
    },
    "limits": {
        "relaunch": {"max_times": 3, "after_restarts": 2, "window_s": 100, "avoid_nodes": 1},
        "timeouts": {"run_s": 100, "start_s": 10, "fault_s": 9, "keep_s": 7},
        "log_rules": [{"name": "x", "pattern": "a(.*)", "threshold": 2, "operator": "gt"}],
    },
    "machines": {"resources": {"instance_type": "ml.p5.48xlarge"}, "workers_per_node": 8},
}
UNREADABLE = {
    "fault_on_match": {"log_rules": [{"name": "x", "pattern": "a", "fault_on_match": True}]},
    "a broken threshold": {"log_rules": [{"name": "x", "pattern": "a(.*)", "threshold": 2.5, "operator": "gt"}]},
}


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    """AWS's class, from its file alone: the package cannot be imported without all that it needs."""
    (file,) = python_of("hyp-model").parents[1].glob(f"lib/*/site-packages/{MODEL}")
    spec = importlib.util.spec_from_file_location("hyp_model", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["hyp_model"] = module  # pydantic looks names up there
    spec.loader.exec_module(module)
    yield module._HyperPodPytorchJob
    del sys.modules["hyp_model"]


def jobs() -> Iterator[tuple[str, str]]:
    for file in EXAMPLES:
        yield file.parent.name, file.read_text()
    for name, fields in CASES.items():
        job = JobConfig.model_validate_json(json.dumps(LEAST | fields))
        yield name, make_plan(job, target="hyperpod-eks").files["job.yaml"]


def read(model: Any, text: str) -> None:
    """As `_load_hp_job` does it: by names, then again by aliases."""
    (found,) = read_all(text)
    spec = model.model_validate(found["spec"], by_name=True)
    model(**spec.model_dump(by_alias=True, exclude_none=True))


def test_the_reader_of_aws_parses_what_we_render(model: Any) -> None:
    seen = []
    for name, text in jobs():
        read(model, text)
        seen.append(name)
    assert len(seen) == len(CASES) + 4


@pytest.mark.parametrize("name", UNREADABLE)
def test_fields_that_it_cannot_parse_are_a_warning(model: Any, name: str) -> None:
    job = JobConfig.model_validate_json(json.dumps(LEAST | UNREADABLE[name]))
    with pytest.raises(ValueError, match="logMonitoringConfiguration"):
        read(model, make_plan(job, target="hyperpod-eks").files["job.yaml"])
    assert "HPX175" in [one.rule for one in find_warnings(job, None, "hyperpod-eks")]

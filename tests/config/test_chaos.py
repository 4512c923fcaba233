"""The grammar of rehearsed faults, and where they are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hyperpod_ext.config.fault_injection import Chaos, InjectedFault, NodeFault, parse_injected
from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.detection.heartbeat import Phase
from hyperpod_ext.runtime.fault_injection.from_worker import armed_faults, is_due
from hyperpod_ext.runtime.fault_injection.orders import orders_folder, read_orders, take


@pytest.mark.parametrize(
    "text",
    [
        "exception:rank=1,step=5,phase=backward",
        "hang:rank=0,how=gil",
        "slow:rank=3,step=2,seconds=0.5,steps=4",
        "corrupt-memory:rank=2,step=7",
    ],
)
def test_a_fault_is_read_and_written_alike(text):
    fault = InjectedFault.parse(text)
    assert InjectedFault.parse(str(fault)) == fault


def test_several_faults_are_separated_by_semicolons():
    assert [fault.kind for fault in parse_injected("sigkill:rank=1,step=5; oom:rank=0")] == ["sigkill", "oom"]
    assert parse_injected("off") == parse_injected("") == ()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("sigkill", "not of the form"),
        ("sigkill:1", "not of the form"),
        ("explode:rank=1", "kind"),
        ("sigkill:step=3", "rank"),
        ("sigkill:rank=one", "rank"),
        ("sigkill:rank=1,step=0", "step"),
        ("sigkill:rank=1,phase=lunch", "phase"),
        ("sigkill:rank=1,when=now", "when"),
    ],
)
def test_what_cannot_be_read_is_told(text, told):
    with pytest.raises(ValueError, match=told):
        InjectedFault.parse(text)


def config(*faults: InjectedFault) -> RuntimeConfig:
    return RuntimeConfig(name="j", nodes=1, workers_per_node=1, chaos=Chaos(inject=faults))


def test_the_spec_and_the_variable_add_up_and_off_is_off():
    spec = config(InjectedFault.parse("oom:rank=0"))
    assert len(armed_faults(spec, {"HPX_CHAOS": "sigkill:rank=0"})) == 2
    assert armed_faults(spec, {"HPX_CHAOS": "off"}) == ()
    with pytest.raises(JobFailedError, match="HPX_CHAOS"):
        armed_faults(spec, {"HPX_CHAOS": "nonsense"})


@pytest.mark.parametrize("variable", ["KUBERNETES_SERVICE_HOST", "SM_TRAINING_ENV"])
def test_faults_are_refused_where_machines_cost_money(variable):
    with pytest.raises(JobFailedError, match="cost money"):
        armed_faults(config(InjectedFault.parse("oom:rank=0")), {variable: "x"})
    assert armed_faults(config(), {variable: "x"}) == ()
    meant = Chaos(inject=(InjectedFault.parse("oom:rank=0"),), on_clusters=True)
    assert len(armed_faults(config().model_copy(update={"chaos": meant}), {variable: "x"})) == 1


@pytest.mark.parametrize(
    ("text", "phase", "step", "due"),
    [
        ("oom:rank=0,step=5", Phase.DATA, 5, True),
        ("oom:rank=0,step=5", Phase.FORWARD, 5, False),
        ("oom:rank=0,step=5", Phase.DATA, 6, False),
        ("oom:rank=0,step=5,phase=rest", Phase.REST, 5, True),
        ("oom:rank=0,phase=rest", Phase.REST, 9, True),
        ("oom:rank=0", Phase.OPTIMIZER, 9, True),
    ],
)
def test_when_a_fault_is_due(text, phase, step, due):
    assert is_due(InjectedFault.parse(text), phase, step) is due


def test_orders_are_read_until_they_are_taken_and_rubbish_is_left_alone(tmp_path: Path):
    assert read_orders(tmp_path) == {}
    folder = orders_folder(tmp_path)
    folder.mkdir(parents=True)
    (folder / "000-a.json").write_text('{"fault": {"kind": "sigkill", "rank": 1}}')
    (folder / "001-b.json").write_text('{"fault": {"kind": "sigkill", "node": 1}}')
    (folder / "002-c.json").write_text('{"fault": {"kind": "rm -rf", "rank": 1}}')
    (folder / "003-d.json").write_text("half a fi")
    os.mkfifo(folder / "004-e.json")  # reading it would never end
    found = read_orders(tmp_path)
    assert {name: type(fault) for name, fault in found.items()} == {"000-a": InjectedFault, "001-b": NodeFault}
    assert take(tmp_path, "000-a")
    assert not take(tmp_path, "000-a")
    assert set(read_orders(tmp_path)) == {"001-b"}

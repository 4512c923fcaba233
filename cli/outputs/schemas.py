"""Table of the output model of each command, and functions that return JSON schemas of outputs and events."""

from __future__ import annotations

from typing import Any

from pydantic import RootModel, create_model

from hyperpod_ext.catalog.aws_terms import Term
from hyperpod_ext.config.files.field_docs import description
from hyperpod_ext.config.files.schema import json_schema
from hyperpod_ext.jobs.contract.differences import FieldDifference
from hyperpod_ext.jobs.doctor import Examined
from hyperpod_ext.jobs.job_files.job_report import Output, ReportOutput
from hyperpod_ext.jobs.own_templates import TemplateDifference
from hyperpod_ext.runtime.events.kinds import THEMES, declared_in

from . import checkpoints, clusters, data, jobs, planning, reference
from .base import ErrorOutput

OUTPUTS: dict[str, Any] = {
    "error": ErrorOutput,
    "cancel": jobs.StatusOutput,
    "chaos": jobs.ChaosOutput,
    "create-job": jobs.PlannedFiles | jobs.Accepted | jobs.Submitted | jobs.Result,
    "delete": jobs.DeleteOutput,
    "describe": jobs.DescribeOutput,
    "diff": list[FieldDifference],
    "doctor": list[Examined] | reference.JobHealth,
    "exec": jobs.CommandOutput,
    "explain": list[reference.RuleSummary] | reference.RuleOutput | list[Term] | reference.FieldOutput,
    "import": jobs.Imported | jobs.ImportedFolder,
    "instances": list[reference.UsableInstance],
    "list": list[jobs.StatusOutput],
    "move": jobs.MoveOutput | jobs.OrderedMove,
    "plan": planning.PlanOutput,
    "port-forward": jobs.CommandOutput,
    "render": jobs.PlannedFiles | jobs.WrittenFiles,
    "report": ReportOutput,
    "resize": jobs.ResizeOutput | jobs.OrderedResize,
    "scales": planning.ScalesOutput,
    "simulate": planning.SimulateOutput,
    "status": jobs.StatusOutput | list[jobs.StatusOutput],
    "top": jobs.TopOutput,
    "validate": jobs.ValidOutput | jobs.ValidTemplates,
    "run": jobs.Result,
    "wait": jobs.Result,
    "checkpoints copy": checkpoints.CopyOutput,
    "checkpoints list": checkpoints.ListOutput,
    "checkpoints prune": checkpoints.PruneOutput,
    "checkpoints show": checkpoints.ShowOutput,
    "checkpoints verify": checkpoints.VerifyOutput,
    "cluster delete": clusters.DeletedCluster,
    "cluster deploy": clusters.DeployOutput,
    "cluster describe": clusters.ClusterOutput,
    "cluster diff": clusters.DiffOutput,
    "cluster list": list[clusters.ClusterSummary],
    "cluster nodes": list[clusters.Node],
    "cluster outputs": clusters.OutputsOutput,
    "cluster synth": clusters.SynthOutput,
    "cluster create": clusters.CreateRequest | clusters.CreatedCluster,
    "data build": data.StoreOutput,
    "data inspect": data.StoreOutput | data.DatasetFile | data.StoresOutput,
    "data verify": data.VerifiedStore,
    "node drain": clusters.DrainOutput,
    "node reboot": clusters.RecoveryOutput,
    "node replace": clusters.RecoveryOutput,
    "templates diff": list[TemplateDifference],
    "templates list": list[str],
    "cluster update": clusters.UpdateOutput,
}
"""Output models by the name of the command, without `hp-ext`. The key `error` has the output of a failed command."""


def output_schema(name: str) -> dict[str, Any]:
    """Return the JSON schema of a command's output. The schema allows unknown fields, because later versions may add
    fields."""
    form = OUTPUTS[name]
    is_model = isinstance(form, type) and issubclass(form, Output)
    schema = json_schema(form if is_model else create_model(name, __base__=RootModel[Any], root=(form, ...)))
    schema["title"] = name if name == "error" else f"hp-ext {name} -o json"
    _allow_more_fields(schema)
    return schema


def event_schema() -> dict[str, Any]:
    """Return the JSON schema of one line of events.jsonl. A line is an event of one of the declared kinds."""
    definitions: dict[str, Any] = {}
    names = []
    for kind in (kind for theme in THEMES for kind in declared_in(theme)):
        schema = kind.model_json_schema()
        definitions |= schema.pop("$defs", {})
        for name, field in schema["properties"].items():
            if text := description(kind, name):
                field["description"] = text
        schema["required"] = sorted({*schema.get("required", ()), "event"})
        definitions[kind.__name__] = schema
        names.append(kind.__name__)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Event"}
    schema = head | {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in names], "$defs": definitions}
    _allow_more_fields(schema)
    return schema


def _allow_more_fields(schema: Any) -> None:
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _allow_more_fields(part)
    if isinstance(schema, dict) and schema.get("additionalProperties") is False:
        del schema["additionalProperties"]

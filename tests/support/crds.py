"""The custom resources that we send, as a Kubernetes API server wants them defined: written from what their operators
document, and not from our own models, so that each can find the other's mistakes.

HyperPodPyTorchJob's own definition is not public: this follows AWS's documentation. PyTorchJob v1 has the fields of
training-operator 1.9. Pods, and TrainJobs, come from the published models of `kubeflow_trainer_api`.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
YES_OR_NO: Schema = {"type": "boolean"}
INT32: Schema = {"type": "integer", "format": "int32"}
INT64: Schema = {"type": "integer", "format": "int64"}
COUNT: Schema = INT32 | {"minimum": 0}
ANYTHING: Schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
EITHER: Schema = {"x-kubernetes-int-or-string": True}
_INT_OR_STRING = ("IoK8sApimachineryPkgApiResourceQuantity", "IoK8sApimachineryPkgUtilIntstrIntOrString")


def choice(*words: str) -> Schema:
    return TEXT | {"enum": list(words)}


def many(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def parts(fields: dict[str, Schema], required: tuple[str, ...] = ()) -> Schema:
    return {"type": "object", "properties": fields} | ({"required": list(required)} if required else {})


def structural(model: Any) -> Schema:
    """A published pydantic model as the schema of a custom resource: everything in place, nothing nullable."""
    whole = model.model_json_schema(by_alias=True)

    def plain(schema: Schema) -> Schema:
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            return EITHER if name in _INT_OR_STRING else plain(whole["$defs"][name])
        if "anyOf" in schema:
            (only,) = [one for one in schema["anyOf"] if one.get("type") != "null"]
            return plain(only)
        match schema.get("type"):
            case "array":
                return many(plain(schema["items"]))
            case "object" if "properties" in schema:
                fields = {name: plain(field) for name, field in schema["properties"].items()}
                return parts(fields, tuple(schema.get("required", ())))
            case "object" if isinstance(values := schema.get("additionalProperties"), dict):
                return {"type": "object", "additionalProperties": plain(values)}
            case "object" | None:
                return ANYTHING
        return {key: schema[key] for key in ("type", "enum", "pattern") if key in schema}

    return plain(whole)


def _pods() -> Schema:
    from kubeflow_trainer_api.models import IoK8sApiCoreV1PodTemplateSpec

    found = structural(IoK8sApiCoreV1PodTemplateSpec)
    text = {"type": "object", "additionalProperties": TEXT}
    found["properties"]["metadata"] = parts({"name": TEXT, "namespace": TEXT, "labels": text, "annotations": text})
    return found


def hyperpod_spec() -> Schema:
    """Of a HyperPodPyTorchJob."""
    log_rule = {
        "name": TEXT,
        "logPattern": TEXT,
        "stopPattern": TEXT,
        "expectedStartCutOffInSeconds": COUNT,
        "expectedRecurringFrequencyInSeconds": COUNT,
        "metricThreshold": NUMBER,
        "operator": choice("gt", "gteq", "lt", "lteq", "eq"),
        "metricEvaluationDataPoints": COUNT,
        "faultOnMatch": YES_OR_NO,
    }
    restart = {
        "evalPeriodSeconds": COUNT,
        "numRestartBeforeFullJobRestart": COUNT,
        "maxFullJobRestarts": COUNT,
        "maxNumRepeatOffendersToAvoid": COUNT,
        "scaleUpSnoozeTimeInSeconds": COUNT,
    }
    run = {
        "cleanPodPolicy": choice("All", "OnlyComplete", "None"),
        "jobMaxRetryCount": COUNT,
        "restartPolicy": parts(restart, ("evalPeriodSeconds",)),
        "activeDeadlineSeconds": COUNT,
        "startupDeadlineSeconds": COUNT,
        "faultDeadlineSeconds": COUNT,
        "ttlSecondsAfterFinished": INT32,
        "suspend": YES_OR_NO,
        "workloadMode": TEXT,
        "logMonitoringConfiguration": many(parts(log_rule, ("name", "logPattern"))),
    }
    elastic = {
        "minReplicas": COUNT,
        "maxReplicas": COUNT,
        "replicaIncrementStep": COUNT,
        "replicaDiscreteValues": many(COUNT),
        "scalingTimeoutInSeconds": COUNT,
        "gracefulShutdownTimeoutInSeconds": COUNT,
        "faultyScaleDownTimeoutInSeconds": COUNT,
    }
    replica = {"name": TEXT, "replicas": COUNT, "maxReplicas": COUNT, "spares": COUNT, "template": _pods()}
    fields = {
        "nprocPerNode": TEXT,
        "replicaSpecs": many(parts(replica, ("name",))),
        "runPolicy": parts(run),
        "elasticPolicy": parts(elastic),
    }
    return parts(fields)


def pytorchjob_spec() -> Schema:
    """Of a PyTorchJob v1."""
    scheduling = {
        "minAvailable": INT32,
        "minResources": {"type": "object", "additionalProperties": EITHER},
        "priorityClass": TEXT,
        "queue": TEXT,
        "scheduleTimeoutSeconds": INT32,
    }
    run = {
        "activeDeadlineSeconds": INT64,
        "backoffLimit": INT32,
        "cleanPodPolicy": TEXT,
        "managedBy": TEXT,
        "schedulingPolicy": parts(scheduling),
        "suspend": YES_OR_NO,
        "ttlSecondsAfterFinished": INT32,
    }
    elastic = {
        **dict.fromkeys(("maxReplicas", "maxRestarts", "minReplicas", "nProcPerNode", "rdzvPort"), INT32),
        **dict.fromkeys(("rdzvBackend", "rdzvHost", "rdzvId"), TEXT),
        "rdzvConf": many(parts({"key": TEXT, "value": TEXT})),
        "standalone": YES_OR_NO,
        "metrics": many(ANYTHING),
    }
    replica = {"replicas": INT32, "restartPolicy": TEXT, "template": _pods()}
    fields = {
        "elasticPolicy": parts(elastic),
        "nprocPerNode": TEXT,
        "pytorchReplicaSpecs": {"type": "object", "additionalProperties": parts(replica)},
        "runPolicy": parts(run),
    }
    return parts(fields, ("pytorchReplicaSpecs",))


def trainjob_spec() -> Schema:
    """Of a TrainJob."""
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJobSpec

    return structural(TrainerV1alpha1TrainJobSpec)


SPECS = {"HyperPodPyTorchJob": hyperpod_spec, "PyTorchJob": pytorchjob_spec, "TrainJob": trainjob_spec}


def definition(kind: Any, spec: Schema) -> dict[str, Any]:
    """The CustomResourceDefinition of a `Kind`."""
    schema = {"openAPIV3Schema": parts({"spec": spec, "status": ANYTHING})}
    version = {"name": kind.version, "served": True, "storage": True, "schema": schema, "subresources": {"status": {}}}
    names = {"plural": kind.plural, "singular": kind.name.lower(), "kind": kind.name}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{kind.group}"},
        "spec": {"group": kind.group, "scope": "Namespaced", "names": names, "versions": [version]},
    }


def unknown(found: Any, schema: Schema, path: str = "") -> list[str]:
    """Where `found` has fields that the schema does not know: a server would drop them, or refuse the object."""
    if "x-kubernetes-int-or-string" in schema:
        return [] if isinstance(found, int | str) else [path]
    if isinstance(found, list):
        items = schema.get("items")
        return (
            [path] if items is None else [one for n, i in enumerate(found) for one in unknown(i, items, f"{path}/{n}")]
        )
    if not isinstance(found, dict):
        kinds = {str: "string", bool: "boolean", int: "integer", float: "number"}
        allowed = {kinds[type(found)]} | ({"number"} if type(found) is int else set())
        return [] if schema.get("type") in allowed else [path]
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return []
    fields, others = schema.get("properties", {}), schema.get("additionalProperties")
    wrong = [f"{path}/{name} is missing" for name in schema.get("required", ()) if name not in found]
    for name, value in found.items():
        inner = fields.get(name, others)
        wrong += [f"{path}/{name}"] if inner is None else unknown(value, inner, f"{path}/{name}")
    return wrong

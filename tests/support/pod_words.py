"""Any pod in Kubernetes' own words: strategies for hypothesis. What they draw is valid field by field, names refer to
what is there, and nothing breaks what the job relies on."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from job_configs import ANY_TEXT, KEY, LABEL, PATH, VALUE, fields

COUNT = st.integers(1, 600)
YES = st.booleans()
WORDS = st.lists(ANY_TEXT, min_size=1, max_size=3)
AMOUNT = st.sampled_from(["1", "500m", "64Mi", "1.5Gi", "2e3"])
ID = st.integers(1, 65534)
TERM_OPERATOR = st.sampled_from(["Exists", "DoesNotExist"])
CONDITION = st.one_of(
    fields({"key": KEY, "operator": TERM_OPERATOR}, {}),
    fields({"key": KEY, "operator": st.just("In"), "values": st.lists(VALUE, min_size=1, max_size=2)}, {}),
)
SELECTOR = fields(
    {}, {"matchLabels": st.dictionaries(KEY, VALUE, max_size=2), "matchExpressions": st.lists(CONDITION, max_size=2)}
)
NODES = fields({"matchExpressions": st.lists(CONDITION, min_size=1, max_size=2)}, {})
POD_TERM = fields({"topologyKey": KEY}, {"labelSelector": SELECTOR, "namespaces": st.lists(LABEL, max_size=1)})
REQUIRED, PREFERRED = (f"{kind}DuringSchedulingIgnoredDuringExecution" for kind in ("required", "preferred"))
PODS = fields(
    {},
    {
        REQUIRED: st.lists(POD_TERM, min_size=1, max_size=2),
        PREFERRED: st.lists(fields({"weight": st.integers(1, 100), "podAffinityTerm": POD_TERM}, {}), max_size=1),
    },
)
AFFINITY = fields(
    {},
    {
        "nodeAffinity": fields(
            {},
            {
                REQUIRED: fields({"nodeSelectorTerms": st.lists(NODES, min_size=1, max_size=2)}, {}),
                PREFERRED: st.lists(fields({"weight": st.integers(1, 100), "preference": NODES}, {}), max_size=1),
            },
        ),
        "podAffinity": PODS,
        "podAntiAffinity": PODS,
    },
)
HANDLER = st.one_of(
    fields({"exec": fields({"command": WORDS}, {})}, {}),
    fields({"httpGet": fields({"port": COUNT}, {"path": PATH, "scheme": st.just("HTTPS")})}, {}),
)
PROBE = st.one_of(HANDLER, fields({"tcpSocket": fields({"port": COUNT}, {})}, {"periodSeconds": COUNT}))
IDENTITY: dict[str, Any] = {"runAsUser": ID, "runAsGroup": ID, "runAsNonRoot": YES}
IDENTITY["seccompProfile"] = st.just({"type": "RuntimeDefault"})
IDENTITY["seLinuxOptions"] = fields({}, {"level": LABEL})
SECURITY = IDENTITY | {
    "allowPrivilegeEscalation": YES,
    "capabilities": fields({}, {"add": st.just(["IPC_LOCK"]), "drop": st.just(["ALL"])}),
}
POD_SECURITY = IDENTITY | {
    "supplementalGroups": st.lists(ID, max_size=2),
    "fsGroupChangePolicy": st.sampled_from(["Always", "OnRootMismatch"]),
}
REFERENCE = st.one_of(
    fields({"fieldRef": fields({"fieldPath": st.sampled_from(["spec.nodeName", "metadata.labels['a']"])}, {})}, {}),
    fields({"configMapKeyRef": fields({"name": LABEL, "key": LABEL}, {"optional": YES})}, {}),
    fields({"resourceFieldRef": fields({"resource": st.just("limits.cpu")}, {"divisor": st.just("1m")})}, {}),
)
VARIABLES = st.lists(st.sampled_from(["one", "two"]), max_size=2, unique=True)
SOURCES = st.one_of(
    fields(
        {"configMapRef": fields({"name": LABEL}, {"optional": YES})}, {"prefix": LABEL.map(lambda text: f"p{text}")}
    ),
    fields({"secretRef": fields({"name": LABEL}, {})}, {}),
)
ITEMS = st.lists(fields({"key": LABEL, "path": LABEL}, {"mode": st.integers(0, 0o777)}), max_size=1)
CLAIM = {
    "spec": {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}},
        "storageClassName": "fast",
    }
}
KINDS: dict[str, st.SearchStrategy[Any]] = {
    "emptyDir": fields({}, {"medium": st.just("Memory"), "sizeLimit": AMOUNT}),
    "hostPath": fields({"path": PATH}, {"type": st.sampled_from(["", "Directory"])}),
    "persistentVolumeClaim": fields({"claimName": LABEL}, {"readOnly": YES}),
    "configMap": fields({"name": LABEL}, {"items": ITEMS, "optional": YES}),
    "secret": fields({"secretName": LABEL}, {"items": ITEMS, "defaultMode": st.integers(0, 0o777)}),
    "downwardAPI": st.just({"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}),
    "projected": st.just(
        {"sources": [{"serviceAccountToken": {"path": "t", "expirationSeconds": 600}}, {"configMap": {"name": "a"}}]}
    ),
    "csi": fields(
        {"driver": st.just("s3.csi.aws.com")}, {"volumeAttributes": st.dictionaries(KEY, ANY_TEXT, max_size=1)}
    ),
    "ephemeral": st.just({"volumeClaimTemplate": CLAIM}),
    "nfs": fields({"server": LABEL, "path": PATH}, {}),
    "image": fields({"reference": st.just("repo/data:1")}, {}),
}
VOLUME_NAMES = ["v-a", "v-b", "v-c"]
OF_ALL: dict[str, Any] = {
    "envFrom": st.lists(SOURCES, max_size=2),
    "terminationMessagePolicy": st.sampled_from(["File", "FallbackToLogsOnError"]),
    "stdin": YES,
    "tty": YES,
    "resizePolicy": st.just([{"resourceName": "cpu", "restartPolicy": "NotRequired"}]),
}
PROBES: dict[str, Any] = {
    "lifecycle": fields({}, {"postStart": HANDLER, "preStop": HANDLER}),
    "livenessProbe": PROBE,
    "readinessProbe": PROBE,
    "startupProbe": PROBE,
}
POD: dict[str, Any] = {
    "affinity": AFFINITY,
    "topologySpreadConstraints": st.lists(
        fields(
            {"maxSkew": COUNT, "topologyKey": KEY, "whenUnsatisfiable": st.just("ScheduleAnyway")},
            {"labelSelector": SELECTOR},
        ),
        max_size=2,
        unique_by=lambda one: one["topologyKey"],
    ),
    "hostAliases": st.just([{"ip": "10.0.0.1", "hostnames": ["a", "b.c"]}]),
    "dnsPolicy": st.sampled_from(["Default", "ClusterFirst"]),
    "dnsConfig": fields(
        {}, {"nameservers": st.just(["10.0.0.2"]), "options": st.just([{"name": "ndots", "value": "1"}])}
    ),
    "runtimeClassName": LABEL,
    "schedulerName": LABEL,
    "preemptionPolicy": st.just("Never"),
    "schedulingGates": st.just([{"name": "example.com/wait"}]),
    "readinessGates": st.just([{"conditionType": "example.com/checked"}]),
    "resourceClaims": st.just([{"name": "gpu", "resourceClaimTemplateName": "gpu"}]),
    "activeDeadlineSeconds": COUNT,
    "shareProcessNamespace": YES,
    "hostIPC": YES,
    "enableServiceLinks": YES,
    "setHostnameAsFQDN": YES,
}
OF_TRAINJOB = {"pod": ("affinity", "schedulingGates", "securityContext", "volumes")}
OF_TRAINJOB["container"] = ("env", "resources", "securityContext", "volumeMounts")
"""What a TrainJob may change of its runtime's pods."""


@st.composite
def pods(draw: st.DrawFn) -> dict[str, Any]:
    """`container` and `pod` of a spec's `kubernetes`."""
    names = draw(st.lists(st.sampled_from(VOLUME_NAMES), unique=True))
    kinds = [draw(st.sampled_from(sorted(KINDS))) for _name in names]
    volumes = [{"name": name, kind: draw(KINDS[kind])} for name, kind in zip(names, kinds, strict=True)]

    def mounts() -> list[dict[str, Any]]:
        chosen = draw(st.lists(st.sampled_from(names), unique=True)) if names else []
        more = st.fixed_dictionaries({}, optional={"readOnly": YES, "subPath": LABEL})
        return [{"name": name, "mountPath": f"/mnt/{name}"} | draw(more) for name in chosen]

    def beside(name: str, optional: dict[str, Any], **required: Any) -> dict[str, Any]:
        required |= {"name": st.just(name), "image": st.just("repo/side:1")}
        more = {"command": WORDS, "workingDir": PATH, "env": _variables(True), "imagePullPolicy": st.just("Always")}
        more["securityContext"] = fields({}, IDENTITY | {"privileged": YES})
        more["resources"] = st.just({"limits": {"cpu": "1"}, "requests": {"cpu": "500m"}})
        return draw(fields(required, OF_ALL | more | optional)) | _filled("volumeMounts", mounts())

    pod = draw(fields({}, POD)) | _filled("volumes", volumes)
    pod["securityContext"] = draw(fields({"fsGroup": ID}, POD_SECURITY))
    if draw(YES):
        pod["initContainers"] = [beside("fetch", {})]
    if draw(YES):
        pod["initContainers"] = [
            *pod.get("initContainers", []),
            beside("sidecar", PROBES, restartPolicy=st.just("Always")),
        ]
    if draw(YES):
        pod["containers"] = [beside("log", PROBES)]
    own = {"env": _variables(False), "securityContext": fields({}, SECURITY)}
    own["resources"] = st.just({"limits": {"memory": "4Ti", "example.com/thing": "1"}})
    own["ports"] = st.just([{"containerPort": 9464, "name": "metrics"}])
    container = draw(fields({}, OF_ALL | PROBES | own)) | _filled("volumeMounts", mounts())
    return {"container": container, "pod": pod}


def _variables(with_values: bool) -> st.SearchStrategy[list[dict[str, Any]]]:
    referred = fields({"name": st.sampled_from(["HOST_A", "HOST_B"]), "valueFrom": REFERENCE}, {})
    plain = fields({"name": st.sampled_from(["HOST_C", "HOST_D"]), "value": ANY_TEXT}, {})
    one = st.one_of(referred, plain) if with_values else referred
    return st.lists(one, max_size=2, unique_by=lambda each: each["name"])


def _filled(name: str, items: list[Any]) -> dict[str, Any]:
    return {name: items} if items else {}

"""Which nodes a pod may be on, and which other pods it should be near or far from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from hyperpod_ext.config.base import ContradictionError
from hyperpod_ext.config.job.pods.later import PodPart
from hyperpod_ext.config.names import DnsLabel, LabelKey, LabelValue

Weight = Annotated[int, Field(ge=1, le=100, examples=[1])]
TopologyKey = Annotated[LabelKey, Field(examples=["topology.kubernetes.io/zone"])]


class LabelCondition(PodPart):
    """One condition on the labels of a pod or namespace."""

    key: Annotated[LabelKey, Field(examples=["team"])]
    """Label that is looked at."""
    operator: Annotated[Literal["In", "NotIn", "Exists", "DoesNotExist"], Field(examples=["Exists"])]
    """How it is compared with `values`."""
    values: tuple[LabelValue, ...] = ()
    """Values of the label, for `In` and `NotIn`."""

    @model_validator(mode="after")
    def _values_fit(self) -> LabelCondition:
        _check_values(self.operator, self.values)
        return self


class NodeCondition(PodPart):
    """One condition on the labels, or fields, of a node."""

    key: Annotated[LabelKey, Field(examples=["topology.kubernetes.io/zone"])]
    """Label of the node."""
    operator: Annotated[Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"], Field(examples=["Exists"])]
    """How it is compared with `values`."""
    values: tuple[str, ...] = ()
    """Values of the label: some for `In` and `NotIn`, one whole number for `Gt` and `Lt`."""

    @model_validator(mode="after")
    def _values_fit(self) -> NodeCondition:
        if self.operator in ("Gt", "Lt"):
            if len(self.values) != 1 or not self.values[0].lstrip("-").isdecimal():
                raise ContradictionError(f"`{self.operator}` needs one whole number in quotes as its values")
        else:
            _check_values(self.operator, self.values)
        return self


class LabelSelector(PodPart):
    """Pods, or namespaces, by their labels; all conditions must hold, and without any all are meant."""

    matchLabels: dict[LabelKey, LabelValue] = {}
    """Labels with the values that they must have."""
    matchExpressions: tuple[LabelCondition, ...] = ()
    """Further conditions."""


class NodeTerm(PodPart):
    """Nodes on which all of these conditions hold."""

    matchExpressions: tuple[NodeCondition, ...] = ()
    """Conditions on the node's labels."""
    matchFields: tuple[NodeCondition, ...] = ()
    """Conditions on its fields; `metadata.name` is the only one."""

    @model_validator(mode="after")
    def _fields_exist(self) -> NodeTerm:
        for one in self.matchFields:
            if one.key != "metadata.name" or one.operator not in ("In", "NotIn") or len(one.values) != 1:
                raise ContradictionError(
                    "matchFields knows `metadata.name`, with `In` or `NotIn` and one name of a node"
                )
        return self


class RequiredNodes(PodPart):
    """Nodes that a pod may be on: those that one of the terms is true of."""

    nodeSelectorTerms: Annotated[
        tuple[NodeTerm, ...],
        Field(min_length=1, examples=[[{"matchExpressions": [{"key": "a", "operator": "Exists"}]}]]),
    ]
    """Terms, one of which must be true. What `scheduling` asks for is added to each."""


class PreferredNodes(PodPart):
    """Nodes that are taken before others."""

    weight: Weight
    """How much it counts, from 1 to 100."""
    preference: Annotated[NodeTerm, Field(examples=[{"matchExpressions": [{"key": "a", "operator": "Exists"}]}])]
    """What is true of these nodes."""


class NodeAffinity(PodPart):
    """Nodes that a pod needs, or likes."""

    requiredDuringSchedulingIgnoredDuringExecution: RequiredNodes | None = None
    """Nodes that it may be on."""
    preferredDuringSchedulingIgnoredDuringExecution: tuple[PreferredNodes, ...] = ()
    """Nodes that are taken first."""


class PodTerm(PodPart):
    """Some pods, and what it means to be near them."""

    topologyKey: TopologyKey
    """Label of nodes: pods on nodes with the same value are near each other."""
    labelSelector: LabelSelector | None = None
    """Labels of these pods. Default: no pods at all."""
    namespaceSelector: LabelSelector | None = None
    """Labels of their namespaces. Default: that of the job alone."""
    namespaces: tuple[DnsLabel, ...] = ()
    """Names of their namespaces, besides."""
    matchLabelKeys: tuple[LabelKey, ...] = ()
    """Labels whose values are those of the pod itself."""
    mismatchLabelKeys: tuple[LabelKey, ...] = ()
    """Labels whose values are others than those of the pod itself."""

    @model_validator(mode="after")
    def _keys_have_a_selector(self) -> PodTerm:
        if (self.matchLabelKeys or self.mismatchLabelKeys) and self.labelSelector is None:
            raise ContradictionError("matchLabelKeys and mismatchLabelKeys need a labelSelector beside them")
        return self


class PreferredPods(PodPart):
    """Pods that it is good to be near, or far from."""

    weight: Weight
    """How much it counts, from 1 to 100."""
    podAffinityTerm: Annotated[PodTerm, Field(examples=[{"topologyKey": "topology.kubernetes.io/zone"}])]
    """Which pods."""


class PodAffinity(PodPart):
    """Pods that a pod must, or should, be near; or far from."""

    requiredDuringSchedulingIgnoredDuringExecution: tuple[PodTerm, ...] = ()
    """All of these must hold."""
    preferredDuringSchedulingIgnoredDuringExecution: tuple[PreferredPods, ...] = ()
    """What should hold."""


class Affinity(PodPart):
    """Where pods are placed, besides what `scheduling` asks for, which is added."""

    nodeAffinity: NodeAffinity | None = None
    """By the nodes."""
    podAffinity: PodAffinity | None = None
    """Near other pods."""
    podAntiAffinity: PodAffinity | None = None
    """Far from other pods."""


class TopologySpread(PodPart):
    """How evenly pods are spread over parts of the cluster."""

    maxSkew: Annotated[PositiveInt, Field(examples=[1])]
    """How many pods one part may have more than another."""
    topologyKey: TopologyKey
    """Label of nodes whose values are the parts."""
    whenUnsatisfiable: Annotated[Literal["DoNotSchedule", "ScheduleAnyway"], Field(examples=["ScheduleAnyway"])]
    """Whether pods wait where that cannot be had."""
    labelSelector: LabelSelector | None = None
    """Pods that are counted. Default: none."""
    matchLabelKeys: tuple[LabelKey, ...] = ()
    """Labels whose values are those of the pod itself."""
    minDomains: PositiveInt | None = None
    """Least number of parts, for `DoNotSchedule`."""
    nodeAffinityPolicy: Literal["Honor", "Ignore"] | None = None
    """Whether nodes that the pod cannot be on are left out."""
    nodeTaintsPolicy: Literal["Honor", "Ignore"] | None = None
    """Whether nodes with taints that it does not tolerate are left out."""

    @model_validator(mode="after")
    def _fits(self) -> TopologySpread:
        if self.minDomains is not None and self.whenUnsatisfiable != "DoNotSchedule":
            raise ContradictionError("minDomains only goes with whenUnsatisfiable: DoNotSchedule", "minDomains")
        if self.matchLabelKeys and self.labelSelector is None:
            raise ContradictionError("matchLabelKeys needs a labelSelector beside it", "matchLabelKeys")
        return self


def _check_values(operator: str, values: tuple[str, ...]) -> None:
    if operator in ("In", "NotIn") and not values:
        raise ContradictionError(f"`{operator}` needs values")
    if operator in ("Exists", "DoesNotExist") and values:
        raise ContradictionError(f"`{operator}` takes no values; remove them, or write `In`", "values")

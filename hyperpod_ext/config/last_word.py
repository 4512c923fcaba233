"""Termination message of our agent's container, which Kubernetes stores in the pod's status."""

from __future__ import annotations

OF_JOB = "hyperpod_ext, the job: "
"""Prefix of a message with the error of the whole job."""
OF_NODE = "hyperpod_ext, node"
"""Prefix of a message with the error of one node. After the prefix follow the node's number and a colon."""
HINT = "\nhint: "
"""Separator between the error and its hint."""

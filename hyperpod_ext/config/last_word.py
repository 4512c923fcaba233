"""Termination message of our agent's container, which Kubernetes stores in the pod's status."""

from __future__ import annotations

OF_JOB = "hyperpod_ext, the job: "
"""Prefix of a job's error."""
OF_NODE = "hyperpod_ext, node"
"""Prefix of a node's error, before its number and a colon."""
HINT = "\nhint: "
"""Separator before the hint."""

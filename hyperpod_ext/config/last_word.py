"""What our agent leaves as its container's termination message, which Kubernetes keeps in the status of the pod."""

from __future__ import annotations

OF_JOB = "hyperpod_ext, the job: "
"""Begins it where it is why the job failed."""
OF_NODE = "hyperpod_ext, node"
"""The same, with the node's number and a colon after it, where it is why that node had to stop."""
HINT = "\nhint: "
"""Between that and what to do."""

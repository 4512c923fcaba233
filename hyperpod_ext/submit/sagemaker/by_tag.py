"""Training jobs of ours, whoever submitted them: by the tag that each carries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyperpod_ext.catalog.labels import JOB as TAG
from hyperpod_ext.submit.sagemaker.client import call

_MOST_PAGES = 10
"""Of a hundred jobs each, newest first: SageMaker keeps jobs for ever."""


def newest_by_name(service: Any, name: str | None = None) -> dict[str, Mapping[str, Any]]:
    """Of each name, or of one, the newest training job, as Search describes it.

    Raises:
        UnreachableError: the service cannot be reached, or does not let us search.
    """
    condition = {"Operator": "Exists"} if name is None else {"Operator": "Equals", "Value": name}
    request: dict[str, Any] = {
        "Resource": "TrainingJob",
        "SearchExpression": {"Filters": [{"Name": f"Tags.{TAG}"} | condition]},
        "SortBy": "CreationTime",
        "SortOrder": "Descending",
        "MaxResults": 100,
    }
    found: dict[str, Mapping[str, Any]] = {}
    for _ in range(_MOST_PAGES):
        page = call("Search TrainingJob", lambda: service.search(**request))
        for job in (one["TrainingJob"] for one in page.get("Results", []) if "TrainingJob" in one):
            ours = {tag["Key"]: tag["Value"] for tag in job.get("Tags", [])}.get(TAG)
            if ours is not None:
                found.setdefault(ours, job)
        if not page.get("NextToken") or (name is not None and found):
            break
        request["NextToken"] = page["NextToken"]
    return found

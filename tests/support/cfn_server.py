"""moto's server with `cfn_shims`: makes every type of the CDK app's stacks. `python cfn_server.py PORT`."""

from __future__ import annotations

import sys
from typing import Any

import cfn_shims  # noqa: F401, its classes are found by being there
from moto.cloudformation.models import CloudFormationBackend
from moto.cloudformation.responses import CloudFormationResponse
from moto.core.responses import ActionResult
from moto.server import main


def _protect(self: CloudFormationResponse) -> ActionResult:
    """The CDK CLI asks for it apart from the stack; moto does not know the action."""
    stack = self.cloudformation_backend.get_stack(self._get_param("StackName"))
    stack.enable_termination_protection = self._get_param("EnableTerminationProtection")
    return ActionResult({"StackId": stack.stack_id})


_resolve = CloudFormationBackend._resolve_update_parameters


def _previous_or_default(
    self: CloudFormationBackend, instance: Any, incoming_params: list[dict[str, Any]]
) -> dict[str, str]:
    """The CDK CLI asks for the previous value of a parameter that had its default, which moto does not keep."""
    known = [one for one in incoming_params if one["ParameterKey"] in instance.parameters or "ParameterValue" in one]
    return _resolve(self, instance, known)


if __name__ == "__main__":
    CloudFormationBackend._resolve_update_parameters = _previous_or_default
    CloudFormationResponse.update_termination_protection = _protect
    main(["-H", "127.0.0.1", "-p", sys.argv[1]])

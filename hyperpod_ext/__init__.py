"""Typed job specs, templates and an in-container runtime for SageMaker HyperPod.

Importing this package costs nothing: every submodule loads what it needs when it is first used.
"""

__version__ = "0.1.0"

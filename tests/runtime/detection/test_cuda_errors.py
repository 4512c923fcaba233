"""After which exceptions a process can be kept."""

from __future__ import annotations

import pytest
import torch

from hyperpod_ext.runtime.detection.cuda_errors import unusable_context

ASYNCHRONOUS = """
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
OutOfMemory = getattr(torch, "OutOfMemoryError", RuntimeError)


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ("CUDA error: an illegal memory access was encountered", "cudaErrorIllegalAddress"),
        ("CUDA error: device-side assert triggered" + ASYNCHRONOUS, "cudaErrorAssert"),
        ("CUDA error: unspecified launch failure", "cudaErrorLaunchFailure"),
        ("CUDA error: uncorrectable ECC error encountered", "cudaErrorECCUncorrectable"),
        ("CUDA error: misaligned address", "cudaErrorMisalignedAddress"),
        ("Triton Error [CUDA]: an illegal memory access was encountered", "cudaErrorIllegalAddress"),
        (
            "NCCL error in: NCCLUtils.cpp:121, unhandled cuda error, NCCL version 2.29.7\nncclUnhandledCudaError: Call "
            "to CUDA function failed.\nLast error:\nCuda failure 719 'unspecified launch failure'",
            "cudaErrorLaunchFailure",
        ),
    ],
)
def test_an_error_that_leaves_the_context_unusable(message: str, name: str):
    found = unusable_context(RuntimeError(message))
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemory("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB"),
        RuntimeError("CUDA error: out of memory" + ASYNCHRONOUS),
        RuntimeError("CUDA error: invalid device ordinal" + ASYNCHRONOUS),
        RuntimeError("CUDA error: no kernel image is available for execution on the device" + ASYNCHRONOUS),
        RuntimeError("CUDA error: operation not permitted when stream is capturing" + ASYNCHRONOUS),
        RuntimeError("Expected all tensors to be on the same device, but found at least two, cuda:0 and cpu"),
        ValueError("row 7 of the table: misaligned address"),
        RuntimeError(),
    ],
    ids=lambda error: str(error)[:40],
)
def test_a_process_is_kept_after_any_other(error: Exception):
    assert unusable_context(error) is None


def test_what_an_exception_was_raised_from_counts():
    def wrapped(*, chained: bool) -> BaseException:
        try:
            try:
                raise RuntimeError("CUDA error: device-side assert triggered")
            except RuntimeError as error:
                raise ValueError("bad batch") from (error if chained else None)
        except ValueError as outer:
            return outer

    for chained in (True, False):  # `from None` hides it from a traceback; the context is as it is
        found = unusable_context(wrapped(chained=chained))
        assert found is not None
        assert found.code == 710


def test_a_chain_that_goes_in_a_circle_ends():
    first, second = RuntimeError("one"), RuntimeError("two")
    first.__cause__, second.__cause__ = second, first
    assert unusable_context(first) is None

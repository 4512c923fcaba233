"""Recognizes exceptions after which the process's CUDA context is unusable: every later CUDA call would fail.

Pure functions. Sources: the entries of `cudaError_t` in `driver_types.h` whose description says that "the process must
be terminated and relaunched", and the entries for uncorrectable memory and NVLink errors. The texts are those of
`cudaGetErrorString`, which torch, NCCL and Triton quote. Not yet tested on a GPU: none of the listed errors has been
provoked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CudaError:
    """A CUDA error after which the CUDA context of the process is unusable."""

    code: int
    name: str
    text: str
    """Text by which the error is recognized in an exception's message."""


CUDA_ERRORS = (
    CudaError(214, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"),
    CudaError(220, "cudaErrorNvlinkUncorrectable", "uncorrectable NVLink error detected during the execution"),
    CudaError(226, "cudaErrorContained", "Invalid access of peer GPU memory over nvlink or a hardware error"),
    CudaError(700, "cudaErrorIllegalAddress", "an illegal memory access was encountered"),
    CudaError(702, "cudaErrorLaunchTimeout", "the launch timed out and was terminated"),
    CudaError(710, "cudaErrorAssert", "device-side assert triggered"),
    CudaError(714, "cudaErrorHardwareStackError", "hardware stack error"),
    CudaError(715, "cudaErrorIllegalInstruction", "an illegal instruction was encountered"),
    CudaError(716, "cudaErrorMisalignedAddress", "misaligned address"),
    CudaError(717, "cudaErrorInvalidAddressSpace", "operation not supported on global/shared address space"),
    CudaError(718, "cudaErrorInvalidPc", "invalid program counter"),
    CudaError(719, "cudaErrorLaunchFailure", "unspecified launch failure"),
)
"""All errors that make the context unusable. Running out of memory is not included, because the context stays usable
after this error."""


def unusable_context(error: BaseException) -> CudaError | None:
    """Return the CUDA error that made the process's context unusable; None if the process can continue.

    The exception's causes are checked too, because a script may catch the CUDA error and raise another exception.
    """
    return next((found for one in _chain(error) if (found := _of_one(one)) is not None), None)


def _of_one(error: BaseException) -> CudaError | None:
    message = str(error)
    # a message without `cuda` is no CUDA error, even if it has a text in `CUDA_ERRORS`
    if "cuda" not in message.lower():
        return None
    return next((known for known in CUDA_ERRORS if known.text in message), None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and all its causes, each only once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__

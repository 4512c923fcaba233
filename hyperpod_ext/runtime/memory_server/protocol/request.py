"""Base class of requests to a memory server. Each request class declares the type of its answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from hyperpod_ext import errors
from hyperpod_ext.runtime.ipc.declared import Declared, read
from hyperpod_ext.runtime.ipc.messages import Message

A = TypeVar("A", bound=Declared)
A_co = TypeVar("A_co", bound=Declared, covariant=True)


class Request(Declared, Generic[A_co]):
    """A request with an answer of type `A_co`."""

    reader = "memory server"

    @classmethod
    def answer_kind(cls) -> type[A_co]:
        """Return the type of the answer."""
        # pydantic has no public function that returns a generic model's type arguments
        kind: type[A_co] = cls.__mro__[1].__pydantic_generic_metadata__["args"][0]  # type: ignore[attr-defined]
        return kind


class Done(Declared):
    """The answer to a request that was carried out and returns nothing."""


def read_answer(request: Request[A], answer: Mapping[str, Any]) -> A:
    """Return the parsed answer to a request.

    Raises:
        HyperpodExtError: the server has answered with an error, which is raised with its original type.
        WireError: the message is not an answer to this request.
    """
    if "error" in answer:
        raise error_of(answer["error"])
    return read(request.answer_kind(), answer, f"the answer to `{type(request).__name__}`")


def refusal(error: Exception) -> Message:
    """Return the answer with which a server refuses a request."""
    known = error if isinstance(error, errors.HyperpodExtError) else errors.HyperpodExtError(str(error) or repr(error))
    return {"error": known.to_json()}


def error_of(described: Mapping[str, Any]) -> errors.HyperpodExtError:
    """Return the error that the peer has described with `HyperpodExtError.to_json`."""
    kind = getattr(errors, str(described.get("code")), errors.HyperpodExtError)
    if not (isinstance(kind, type) and issubclass(kind, errors.HyperpodExtError)) or issubclass(
        kind, errors.ConfigError
    ):
        kind = errors.HyperpodExtError
    return kind(str(described.get("message")), hint=str(described.get("hint") or ""))

"""The base of requests to a memory server, each of which names the kind of its answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from hyperpod_ext import errors
from hyperpod_ext.runtime.ipc.declared import Declared, read
from hyperpod_ext.runtime.ipc.messages import Message

A = TypeVar("A", bound=Declared)
A_co = TypeVar("A_co", bound=Declared, covariant=True)


class Request(Declared, Generic[A_co]):
    """A question, or an order; `A_co` is what answers it."""

    reader = "memory server"

    @classmethod
    def answer_kind(cls) -> type[A_co]:
        """What answers it."""
        # pydantic keeps a model's type arguments there, and has no public way to ask for them
        kind: type[A_co] = cls.__mro__[1].__pydantic_generic_metadata__["args"][0]  # type: ignore[attr-defined]
        return kind


class Done(Declared):
    """It is done, and there is nothing to say."""


def read_answer(request: Request[A], answer: Mapping[str, Any]) -> A:
    """The answer to a request.

    Raises:
        HyperpodExtError: the server refuses; its error, as its own type.
        WireError: it is no answer to this request.
    """
    if "error" in answer:
        raise error_of(answer["error"])
    return read(request.answer_kind(), answer, f"the answer to `{type(request).__name__}`")


def refusal(error: Exception) -> Message:
    """What a server answers in place of what was asked for."""
    known = error if isinstance(error, errors.HyperpodExtError) else errors.HyperpodExtError(str(error) or repr(error))
    return {"error": known.to_json()}


def error_of(described: Mapping[str, Any]) -> errors.HyperpodExtError:
    """The error that `HyperpodExtError.to_json` described on the other side."""
    kind = getattr(errors, str(described.get("code")), errors.HyperpodExtError)
    if not (isinstance(kind, type) and issubclass(kind, errors.HyperpodExtError)) or issubclass(
        kind, errors.ConfigError
    ):
        kind = errors.HyperpodExtError
    return kind(str(described.get("message")), hint=str(described.get("hint") or ""))

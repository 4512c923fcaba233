"""Evaluates IAM policies as AWS documents it, for requests within one account. Raises on what it does not know.

An explicit deny wins. Else S3 allows what the identity's policies or the bucket's policy allow. KMS and roles allow
only what their own policy allows; a key policy that names the account hands the decision to the identity's policies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Statement = Mapping[str, Any]


@dataclass(frozen=True)
class Principal:
    """Who asks."""

    arn: str = ""
    """`arn:aws:iam::123456789012:role/a`; empty for a service."""
    service: str = ""
    """`sagemaker.amazonaws.com`."""
    policies: tuple[Mapping[str, Any], ...] = ()
    """Documents that are attached to it."""

    @property
    def account(self) -> str:
        return self.arn.split(":")[4] if self.arn else ""


@dataclass(frozen=True)
class Request:
    """What is asked for."""

    principal: Principal
    action: str
    resource: str
    context: Mapping[str, Any] = field(default_factory=dict)
    """Condition keys in lower case, and their values: a text, or several."""


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def statements(document: Mapping[str, Any]) -> list[Statement]:
    return as_list(document["Statement"])


def verdict(request: Request, document: Mapping[str, Any], *, of_resource: bool) -> str:
    """`deny`, `allow`, `account` (allowed to the whole account, if its own policies agree), or `nothing`."""
    found = set()
    for statement in statements(document):
        if of_resource and (kind := _speaks_of(statement, request.principal)) is None:
            continue
        if _covers(statement, request) and _holds(statement.get("Condition", {}), request.context):
            if statement["Effect"] == "Deny":
                return "deny"
            found.add(kind if of_resource else "allow")
    return "allow" if "allow" in found else "account" if "account" in found else "nothing"


def allowed(request: Request, resource_policy: Mapping[str, Any] | None = None) -> bool:
    """Whether the request goes through. `resource_policy`: of the bucket, key or role that is asked for."""
    own = [verdict(request, document, of_resource=False) for document in request.principal.policies]
    other = "nothing" if resource_policy is None else verdict(request, resource_policy, of_resource=True)
    if "deny" in own or other == "deny":
        return False
    identity = "allow" in own
    match request.action.partition(":")[0]:
        case "kms":
            return other == "allow" or (other == "account" and identity)
        case "sts":
            return other == "allow" or (other == "account" and identity)
        case _:
            return identity or other == "allow"


def _speaks_of(statement: Statement, principal: Principal) -> str | None:
    """`allow` for this very principal, `account` for its account, None for others."""
    if "NotPrincipal" in statement:
        raise NotImplementedError("NotPrincipal")
    named = statement["Principal"]
    if named == "*":
        return "allow"
    for kind, values in named.items():
        for value in as_list(values):
            if kind == "Service" and principal.service == value:
                return "allow"
            if kind == "AWS" and value == "*":
                return "allow"
            if kind == "AWS" and principal.arn and value == principal.arn:
                return "allow"
            root = re.fullmatch(r"arn:[a-z-]+:iam::(\d{12}):root|(\d{12})", value) if kind == "AWS" else None
            if root and principal.account in root.groups():
                # a deny to the account is one to each of its principals
                return "account" if statement["Effect"] == "Allow" else "allow"
            if kind not in ("AWS", "Service"):
                raise NotImplementedError(f"Principal of kind {kind}")
    return None


def _covers(statement: Statement, request: Request) -> bool:
    if "Action" in statement:
        action = any(_like(one.lower(), request.action.lower()) for one in as_list(statement["Action"]))
    else:
        action = not any(_like(one.lower(), request.action.lower()) for one in as_list(statement["NotAction"]))
    if not action:
        return False
    if "Resource" in statement:
        return any(_like(_filled(one, request.context), request.resource) for one in as_list(statement["Resource"]))
    if "NotResource" in statement:
        named = as_list(statement["NotResource"])
        return not any(_like(_filled(one, request.context), request.resource) for one in named)
    return True  # a role's trust policy


def _filled(text: str, context: Mapping[str, Any]) -> str | None:
    """`text` with its policy variables; None where one has no value, and the element then fits nothing."""
    missing = False

    def value(found: re.Match[str]) -> str:
        nonlocal missing
        name, _, default = (part.strip() for part in found[1].partition(","))
        if name in ("*", "?", "$"):
            return f"[{name}]"
        known = context.get(name.lower())
        if isinstance(known, str):
            return re.sub(r"([*?\[])", r"[\1]", known)  # a value is never a pattern
        if default:
            return default.strip("'")
        missing = True
        return ""

    filled = re.sub(r"\$\{([^}]*)\}", value, text)
    return None if missing else filled


def _like(pattern: str | None, value: str) -> bool:
    """`*` and `?` as IAM has them: over `/` and `:` too. `[*]` is the character itself."""
    if pattern is None:
        return False
    parts = re.split(r"(\[[*?$\[]\]|\*|\?)", pattern)
    words = {"*": ".*", "?": "."}
    regex = "".join(words.get(part) or re.escape(part[1] if re.fullmatch(r"\[.\]", part) else part) for part in parts)
    return re.fullmatch(regex, value, re.DOTALL) is not None


def _holds(conditions: Mapping[str, Mapping[str, Any]], context: Mapping[str, Any]) -> bool:
    return all(
        _condition(operator, key, [str(one) for one in _words(as_list(wanted))], context)
        for operator, keys in conditions.items()
        for key, wanted in keys.items()
    )


def _words(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        yield str(value).lower() if isinstance(value, bool) else value


def _condition(operator: str, key: str, wanted: list[str], context: Mapping[str, Any]) -> bool:
    qualifier, _, bare = operator.rpartition(":")
    optional, name = bare.endswith("IfExists"), bare.removesuffix("IfExists")
    values = context.get(key.lower())
    if name == "Null":
        return any((one.lower() == "true") == (values is None) for one in wanted)
    negated = name.startswith(("StringNot", "ArnNot", "NumericNot"))
    test = _OPERATORS[name.replace("Not", "", 1) if negated else name]  # a KeyError here is an operator to be added
    filled = [one for text in wanted if (one := _filled(text, context)) is not None]
    if values is None:
        if qualifier == "ForAllValues":
            return True
        return False if qualifier == "ForAnyValue" else optional or negated

    def fits(value: Any) -> bool:
        found = any(test(one, str(value).lower() if isinstance(value, bool) else str(value)) for one in filled)
        return found != negated

    several = as_list(values)
    if qualifier == "ForAllValues":
        return all(map(fits, several))
    if qualifier == "ForAnyValue":
        return any(map(fits, several))
    if len(several) != 1:
        raise NotImplementedError(f"{operator} of a key with several values")
    return fits(several[0])


def _plain(text: str) -> str:
    return re.sub(r"\[([*?$\[])\]", r"\1", text)


def _arn_like(pattern: str, value: str) -> bool:
    ours, theirs = pattern.split(":", 5), value.split(":", 5)
    return len(ours) == len(theirs) == 6 and all(_like(one, two) for one, two in zip(ours, theirs, strict=True))


_OPERATORS: dict[str, Callable[[str, str], bool]] = {
    "StringEquals": lambda wanted, value: _plain(wanted) == value,
    "StringEqualsIgnoreCase": lambda wanted, value: _plain(wanted).lower() == value.lower(),
    "StringLike": _like,
    "ArnEquals": _arn_like,
    "ArnLike": _arn_like,
    "Bool": lambda wanted, value: wanted.lower() == value.lower(),
    "NumericEquals": lambda wanted, value: float(wanted) == float(value),
    "NumericLessThan": lambda wanted, value: float(value) < float(wanted),
    "NumericLessThanEquals": lambda wanted, value: float(value) <= float(wanted),
    "NumericGreaterThan": lambda wanted, value: float(value) > float(wanted),
    "NumericGreaterThanEquals": lambda wanted, value: float(value) >= float(wanted),
}

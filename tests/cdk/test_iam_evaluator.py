"""The policy evaluator, beside what AWS documents of each rule."""

from __future__ import annotations

from typing import Any

import pytest
from policy import Principal, Request, allowed

ROLE = "arn:aws:iam::123456789012:role/a"
BUCKET, OBJECT = "arn:aws:s3:::b", "arn:aws:s3:::b/jobs/a/x"
ALLOW = {"Effect": "Allow", "Action": "s3:GetObject", "Resource": f"{BUCKET}/jobs/a/*"}


def asks(
    *own: dict[str, Any],
    action: str = "s3:GetObject",
    resource: str = OBJECT,
    other: list[dict[str, Any]] | None = None,
    **context: Any,
) -> bool:
    """Whether a role with these statements may; `other`: statements of the resource's policy."""
    who = Principal(ROLE, policies=({"Statement": list(own)},))
    known = {name.replace("__", ":"): value for name, value in context.items()}
    return allowed(Request(who, action, resource, known), None if other is None else {"Statement": other})


def when(operator: str, key: str, *values: Any) -> dict[str, Any]:
    return ALLOW | {"Condition": {operator: {key: list(values)}}}


def test_nothing_is_allowed_that_no_statement_allows() -> None:
    assert not asks()
    assert asks(ALLOW)
    assert not asks(ALLOW, resource="arn:aws:s3:::b/jobs/b/x")
    assert not asks(ALLOW, action="s3:PutObject")


def test_actions_have_no_case_resources_do_and_stars_go_over_slashes() -> None:
    assert asks(ALLOW | {"Action": "S3:get*"})
    assert not asks(ALLOW | {"Resource": "arn:aws:s3:::B/*"})
    assert asks(ALLOW | {"Resource": "arn:aws:s3:::b/*/x"}, resource="arn:aws:s3:::b/one/two/x")
    assert asks(ALLOW | {"Resource": "arn:aws:s3:::b/jobs/?/x"})


def test_an_explicit_deny_wins_wherever_it_is() -> None:
    deny = {"Effect": "Deny", "Action": "s3:*", "Resource": "*"}
    assert not asks(ALLOW, deny)
    assert not asks(ALLOW, other=[deny | {"Principal": "*"}])
    assert not asks(ALLOW, other=[deny | {"Principal": {"AWS": "arn:aws:iam::123456789012:root"}}])
    assert asks(ALLOW, other=[deny | {"Principal": {"AWS": "arn:aws:iam::999999999999:root"}}])


def test_a_bucket_policy_allows_by_itself_and_a_key_needs_its_own() -> None:
    mine = {"Effect": "Allow", "Action": "*", "Resource": "*", "Principal": {"AWS": ROLE}}
    assert asks(other=[mine])
    kms = {"action": "kms:Decrypt", "resource": "arn:aws:kms:r:1:key/k"}
    own = {"Effect": "Allow", "Action": "kms:Decrypt", "Resource": "*"}
    account = mine | {"Principal": {"AWS": "arn:aws:iam::123456789012:root"}}
    assert not asks(own, other=[], **kms)
    assert not asks(other=[account], **kms)
    assert asks(own, other=[account], **kms)
    assert asks(other=[mine], **kms)


def test_a_service_is_not_a_role() -> None:
    trust = {
        "Statement": [{"Effect": "Allow", "Principal": {"Service": "a.amazonaws.com"}, "Action": "sts:AssumeRole"}]
    }
    for who, granted in ((Principal(service="a.amazonaws.com"), True), (Principal(service="b.amazonaws.com"), False),
                         (Principal(ROLE), False)):  # fmt: skip
        assert allowed(Request(who, "sts:AssumeRole", ROLE), trust) is granted


@pytest.mark.parametrize(
    ("operator", "values", "there", "absent"),
    [
        ("StringEquals", ("a", "b"), True, False),
        ("StringNotEquals", ("b", "c"), True, True),
        ("StringNotEquals", ("a", "c"), False, True),
        ("StringEqualsIfExists", ("b",), False, True),
        ("StringNotEqualsIfExists", ("a",), False, True),
        ("StringLike", ("?",), True, False),
        ("StringNotLike", ("a*",), False, True),
        ("StringEqualsIgnoreCase", ("A",), True, False),
        ("ForAllValues:StringEquals", ("a",), True, True),
        ("ForAnyValue:StringEquals", ("a",), True, False),
        ("Null", ("false",), True, False),
        ("Null", (True,), False, True),
    ],
)
def test_operators_on_a_key_that_is_there_and_one_that_is_not(
    operator: str, values: tuple[Any, ...], there: bool, absent: bool
) -> None:
    assert asks(when(operator, "s3:key", *values), s3__key="a") is there
    assert asks(when(operator, "s3:key", *values)) is absent


def test_several_values_are_compared_all_or_any() -> None:
    assert not asks(when("ForAllValues:StringEquals", "k", "a"), k=["a", "b"])
    assert asks(when("ForAnyValue:StringEquals", "k", "a"), k=["a", "b"])
    assert not asks(when("ForAnyValue:StringEquals", "k", "c"), k=["a", "b"])


def test_numbers_booleans_and_arns() -> None:
    assert asks(when("NumericLessThan", "v", 1.2), v=1.1)
    assert not asks(when("NumericLessThan", "v", 1.2), v=1.2)
    assert asks(when("Bool", "t", "false"), t=False)
    assert not asks(when("Bool", "t", "false"), t=True)
    assert asks(when("ArnLike", "arn", "arn:aws:iam::*:role/x/*"), arn="arn:aws:iam::1:role/x/y")
    assert not asks(when("ArnLike", "arn", "arn:*:role/x"), arn="arn:aws:iam::1:role/x")  # part by part


def test_all_conditions_must_hold() -> None:
    both = ALLOW | {"Condition": {"StringEquals": {"a": "1", "b": "2"}}}
    assert asks(both, a="1", b="2")
    assert not asks(both, a="1", b="3")


def test_variables_are_filled_in_and_their_values_are_no_patterns() -> None:
    own = ALLOW | {"Resource": "arn:aws:s3:::b/${aws:PrincipalTag/team}/*"}
    at = {"resource": "arn:aws:s3:::b/red/x"}
    assert asks(own, **at, **{"aws:principaltag/team": "red"})
    assert not asks(own, **at, **{"aws:principaltag/team": "*"})
    assert not asks(own, **at)
    assert asks(ALLOW | {"Resource": "arn:aws:s3:::b/${*}"}, resource="arn:aws:s3:::b/*")
    assert not asks(ALLOW | {"Resource": "arn:aws:s3:::b/${*}"}, resource="arn:aws:s3:::b/c")


def test_not_action_and_not_resource_cover_the_rest() -> None:
    rest = {"Effect": "Deny", "NotAction": "s3:GetObject", "Resource": "*"}
    assert asks(ALLOW, rest)
    assert not asks(ALLOW | {"Action": "s3:*"}, rest, action="s3:PutObject")
    elsewhere = {"Effect": "Deny", "Action": "s3:*", "NotResource": "arn:aws:s3:::b/jobs/a/*"}
    assert asks(ALLOW | {"Resource": "*"}, elsewhere)
    assert not asks(ALLOW | {"Resource": "*"}, elsewhere, resource="arn:aws:s3:::b/y")


def test_what_it_does_not_know_is_no_answer() -> None:
    with pytest.raises(KeyError):
        asks(when("DateLessThan", "k", "2026-01-01"), k="2025-01-01")
    with pytest.raises(NotImplementedError):
        asks(ALLOW, other=[{"Effect": "Deny", "NotPrincipal": {"AWS": ROLE}, "Action": "*", "Resource": "*"}])

"""YAML as plain data, with the line of every value."""

from __future__ import annotations

import pytest

from hyperpod_ext.config.files.document import parse, parse_all


def test_every_value_knows_its_line() -> None:
    document = parse("a: 1\nb:\n  - x\n  - {c: 2}\n", "f")
    assert document.data == {"a": 1, "b": ["x", {"c": 2}]}
    assert [document.location(path).line for path in [("a",), ("b",), ("b", 0), ("b", 1, "c")]] == [1, 2, 3, 4]


def test_what_was_not_written_points_at_what_is_around_it() -> None:
    document = parse("a: 1\nb:\n  c: 2\n", "f")
    assert document.location(("b", "d")).line == 2
    assert document.location(("e",)).line == 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("on", "on"),
        ("no", "no"),
        ("1:30", "1:30"),
        ("2026-11-20", "2026-11-20"),
        ("1_000", "1_000"),
        ("010", 10),
        ("0x10", 16),
        ("0o17", 15),
        ("-3", -3),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("1.2.3", "1.2.3"),
        ("true", True),
        ("~", None),
        ("'5'", "5"),
        ("!!str 5", "5"),
    ],
)
def test_scalars_are_read_as_yaml_1_2_reads_them(text: str, value: object) -> None:
    data = parse(f"a: {text}\n", "f").data
    assert data == {"a": value}
    assert isinstance(data, dict)
    assert type(data["a"]) is type(value)


def test_anchors_and_merges_work_and_own_fields_win() -> None:
    document = parse("base: &b {x: 1, y: 2}\nuse:\n  <<: *b\n  y: 3\nsame: *b\n", "f")
    assert document.data == {"base": {"x": 1, "y": 2}, "use": {"x": 1, "y": 3}, "same": {"x": 1, "y": 2}}


def test_an_anchor_that_merges_another_brings_its_fields_once() -> None:
    nested = parse("a: &a {x: 1, y: 2}\nb: &b {<<: *a, y: 3}\nuse: {<<: [*b, *a], z: 4}\n", "f")
    assert (nested.data["use"], nested.problems) == ({"z": 4, "y": 3, "x": 1}, [])  # type: ignore[index]
    levels = "".join(f"l{n}: &l{n} {{<<: [*l{n - 1}, *l{n - 1}], k{n}: 0}}\n" for n in range(1, 60))
    assert len(parse(f"l0: &l0 {{x: 1}}\n{levels}", "f").data["l59"]) == 60  # type: ignore[index]  # not 2**59 reads
    parse("a: &a {<<: *a, x: 1}\n", "f")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &x [*x]\n", "contains itself"),
        ("a: &x {b: *x}\n", "contains itself"),
        ("a: !python/object:os.system x\n", "is not supported"),
        ("[1, 2]: x\n", "must be a word"),
        ("a: !!int x\n", "cannot be read as int"),
        ("a: {<<: 3}\n", "can only merge mappings"),
        ("a: [&b {x: 1}, {<<: [*b, 3]}]\n", "can only merge mappings"),
        ('a: "\\ud800"\n', "cannot be read as str"),
    ],
)
def test_what_json_cannot_hold_is_a_problem_with_its_line(text: str, message: str) -> None:
    problems = parse(text, "f").problems
    assert message in problems[0].message
    assert problems[0].line == 1


def test_yaml_that_is_nested_too_deep_is_one_mistake() -> None:
    (problem,) = parse("a: " + "[" * 5000, "job.yaml").problems
    message = "the YAML is nested too deeply to be read (use fewer levels of brackets, or of indent)"
    assert str(problem) == f"job.yaml: {message}"


def test_aliases_that_multiply_are_refused_at_once() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    (problem,) = parse("\n".join(lines), "f").problems
    assert "more than 100,000 values after its aliases are expanded" in str(problem)


@pytest.mark.parametrize("number", ["9223372036854775808", "-9223372036854775809", "0xfffffffffffffffff"])
def test_a_number_that_no_reader_takes_is_refused(number: str) -> None:
    (problem,) = parse(f"nodes: {number}\n", "f").problems
    assert (problem.path, problem.line) == ("nodes", 1)
    assert "larger than" in problem.message


def test_every_document_of_a_file_is_read_with_lines_of_the_file() -> None:
    first, second = parse_all("a: 1\n---\nb:\n  c: 2\n", "f")
    assert (first.data, second.data) == ({"a": 1}, {"b": {"c": 2}})
    assert second.location(("b", "c")).line == 4

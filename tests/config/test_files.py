"""YAML as the input files mean it, and every way in which a file can be unreadable."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.config.validation import validated
from simulator.errors import InputError
from simulator.hardware.cluster_spec import ClusterSpec
from simulator.input_files import MAX_FILE_BYTES, parse_changes, parse_yaml, read_json, read_yaml, with_changes


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("450e9", 450e9),
        ("25E6", 25e6),
        ("1e-6", 1e-6),
        (".5", 0.5),
        ("-3.25e+2", -325.0),
        ("1_000", 1000),
        ("012", 12),  # YAML 1.1 would read an octal 10
        # YAML 1.2 would read 31, 15 and 8000: here they are text, which keys of numbers refuse.
        ("0x1F", "0x1F"),
        ("0o17", "0o17"),
        ("8__000", "8__000"),
        ("1:30", "1:30"),  # YAML 1.1 would read 90
        ("2024-01-01", "2024-01-01"),
        ("1f1b", "1f1b"),
        ("none", "none"),
        ("null", None),
        ("true", True),
        (".inf", float("inf")),
        ("-.inf", float("-inf")),
        ("e9", "e9"),
        (".", "."),
        ("-", None),
    ],
)
def test_scalars_mean_what_they_say(text: str, value: object) -> None:
    if text == "-":  # a list with one empty entry, not a number
        assert parse_yaml(text, "f") == [None]
        return
    got = parse_yaml(text, "f")
    assert got == value
    assert type(got) is type(value)


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers())
def test_every_number_that_python_writes_is_read_back(real: float, whole: int) -> None:
    assert parse_yaml(repr(real), "f") == real
    assert parse_yaml(repr(whole), "f") == whole


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"  \n\n", "is empty"),
        (b"# only a comment\n", "is empty"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "is not text"),
        (b"a: \x00", "is not text"),
        (b"\xff\xfea", "is not text"),  # half a character of UTF-16
        ("word".encode("utf-16"), "must hold keys and values at its top level"),
        (b"- 1\n- 2\n", "must hold keys and values at its top level"),
        (b"just words", "must hold keys and values at its top level"),
        (b"a: 1\nb: [1, 2\nc: 3\n", "line 3"),
        (b"a: 1\n\tb: 2\n", "line 2"),
        (b"a:\n  b: 1\n  c: 2\n  b: 3\n", "line 4, column 3: duplicate key 'b'"),
        (b"a: 1\nA: 2\na: 3\n", "line 3, column 1: duplicate key 'a'"),
        (b"a: 1\nb: !!timestamp x\n", "line 2, column 4: holds a value that cannot be read: 'x' as timestamp"),
        (b"a: !!bool x\n", "line 1, column 4: holds a value that cannot be read: 'x' as bool"),
        (b"a: !!int x\n", "line 1, column 4: "),
        (b"a: !!float x\n", "line 1, column 4: "),
        (b"a: !!set [1]\n", "line 1, column 4: "),
        (b"a: !!timestamp 2024-13-45\n", "line 1, column 4: "),
        (b"<<: 1\n", "line 1"),
        (b"a: !!python/object:os.system x\n", "line 1"),
        (b"a: 1\n---\nb: 2\n", "line 2"),
        (b"? [1, 2]\n: 3\n", "line 1"),
        (b"a: *b\n", "line 1"),
        (b"a: " + b"[" * 1500, "nested too deeply"),
        (b"a: " + b"9" * 5000, "cannot be read"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "w.yaml"
    file.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_yaml(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": ' + b"[" * 100_000, "is nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "cannot be read as JSON: a number has 5,000 digits"),
        (b'{"a": 1, "a": 2}', "cannot be read as JSON: duplicate key 'a'"),
    ],
)
def test_what_json_cannot_be_is_said_in_words(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_json(file)
    assert str(caught.value) == f"{file}: {message}"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_text_is_read_in_each_encoding_with_a_mark(tmp_path: Path, encoding: str) -> None:
    """PowerShell's ``>`` writes UTF-16 with its mark, Notepad UTF-8 with one."""
    file = tmp_path / "w.yaml"
    mark = "\ufeff" if encoding in ("utf-16-le", "utf-16-be") else ""
    file.write_bytes(f"{mark}name: \u00fcber\n".encode(encoding))
    assert read_yaml(file) == {"name": "\u00fcber"}


#: Signs of YAML, and what stands between them.
SIGNS = [
    "a",
    "1",
    "é",
    ":",
    "- ",
    ", ",
    " ",
    "\n",
    "\n  ",
    "\r",
    "\t",
    "[",
    "]",
    "{",
    "}",
    "'",
    '"',
    "#",
    "&x",
    "*x",
    "!",
    "|",
    ">",
]


@given(st.lists(st.sampled_from([*SIGNS, "?", "%", "@", "---", "<<", "~", "\\", "`", "=", "\x85"]), max_size=12))
def test_text_means_the_same_with_and_without_libyaml(signs: list[str]) -> None:
    """A file is legal on every installation of PyYAML or on none, and refused in the same words."""

    def told() -> str:
        try:
            return repr(parse_yaml("".join(signs), "x.yaml"))
        except InputError as error:
            return str(error)

    with pytest.MonkeyPatch.context() as patch:
        quick = told()
        patch.setattr("yaml.__with_libyaml__", False)
        assert told() == quick


def test_merge_keys_are_filled_in_and_keys_beside_them_win() -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {<<: *a, y: 2}\nc: {z: 3, <<: [*b, {w: 4}]}"
    assert parse_yaml(text, "f") == {
        "a": {"x": 1, "y": 1},
        "b": {"x": 1, "y": 2},
        "c": {"x": 1, "y": 2, "w": 4, "z": 3},
    }
    with pytest.raises(InputError, match="line 2, column 19: duplicate key 'y'"):
        parse_yaml("a: &a {x: 1}\nb: {<<: *a, y: 2, y: 3}", "f")
    doubled = ["a0: &a0 {x: 1}"] + [f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}" for i in range(1, 60)]
    assert parse_yaml("\n".join(doubled), "f")["a59"] == {"x": 1}


def test_of_many_problems_the_first_are_said_and_the_rest_counted() -> None:
    data = {"name": "c"} | {f"unknown{i}": i for i in range(20_000)}
    start = time.process_time()
    with pytest.raises(InputError) as caught:
        validated(ClusterSpec, data, "f")
    assert time.process_time() - start < 1.0
    lines = str(caught.value).splitlines()
    assert sum(line.startswith("f: ") for line in lines) == 20
    assert lines[-1] == "... and 19,980 more"


def test_missing_directory_and_oversized_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_yaml(tmp_path / "absent.yaml")
    with pytest.raises(InputError, match="is a directory"):
        read_yaml(tmp_path)
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(InputError, match="too large"):
        read_yaml(large)


def test_aliases_that_double_are_neither_expanded_nor_printed(tmp_path: Path) -> None:
    """Forty doublings would be 2^40 entries; the message stays short."""
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40)]
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    from simulator.config import load_workload

    with pytest.raises(InputError) as caught:
        load_workload(tmp_path / "bomb.yaml")
    assert len(str(caught.value)) < 20_000


@pytest.mark.parametrize("text", ["a: &x {b: [*x]}", "&x [*x]", "a: &x {<<: *x}"])
def test_a_value_that_refers_to_itself_is_refused(text: str) -> None:
    """An alias inside its own anchor; behind it the same alias is a copy."""
    with pytest.raises(InputError, match=r"f: line 1, column \d+: a value refers to itself by \*x"):
        parse_yaml(text, "f")
    assert parse_yaml("[&x {b: 1}, *x, {c: *x}]", "f") == [{"b": 1}, {"b": 1}, {"c": {"b": 1}}]


def test_changes_are_parsed_as_yaml_and_refused_without_a_value() -> None:
    assert parse_changes(["a.b=1e3", "a.c=[1, 2]", "a.d=x=y", "a.b=2"]) == {"a.b": 2, "a.c": [1, 2], "a.d": "x=y"}
    for text in ("a.b", "=1", ".=1", "a..b=1", ""):
        with pytest.raises(InputError, match="KEY=VALUE"):
            parse_changes([text])
    with pytest.raises(InputError, match="--set a"):
        parse_changes(["a=[1"])


def test_changes_leave_the_original_alone_and_do_not_reach_into_values() -> None:
    data = {"a": {"b": 1}, "c": [1]}
    assert with_changes(data, {"a.b": 2, "a": {"x": {"y": 3}}}, {}) == {"a": {"b": 2, "x": {"y": 3}}, "c": [1]}
    assert with_changes(data, {"a.b": 2, "a.x.y": 3}, {}) == {"a": {"b": 2, "x": {"y": 3}}, "c": [1]}
    assert data == {"a": {"b": 1}, "c": [1]}
    with pytest.raises(InputError, match="c has no keys inside"):
        with_changes(data, {"c.0": 2}, {})


def test_a_section_and_a_key_inside_it_may_be_changed_in_either_order() -> None:
    """The key inside counts; a plain text in place of a section and the key that it stands for cannot both."""
    changes: dict[str, object] = {"cluster.node.host_speed": 0.8, "training.recompute.layers": 2}
    changes |= {"cluster": "hgx_h200_8gpu", "training.recompute": "full", "cluster.nodes": 2}
    short = {"cluster": "name", "training.recompute": "granularity"}
    expected = {
        "cluster": {"name": "hgx_h200_8gpu", "node": {"host_speed": 0.8}, "nodes": 2},
        "training": {"recompute": {"granularity": "full", "layers": 2}},
    }
    for order in itertools.permutations(changes):
        assert with_changes({"cluster": "dgx_a100"}, {key: changes[key] for key in order}, short) == expected
    with pytest.raises(InputError, match=r"cluster and cluster\.name are one thing"):
        with_changes({}, {"cluster.name": "dgx_a100", "cluster": "dgx_h100"}, short)
    assert with_changes({}, {"cluster.name": "one", "cluster": "one"}, short) == {"cluster": {"name": "one"}}


def test_a_file_that_is_read_again_is_as_it_stands_there(tmp_path: Path) -> None:
    """Changes that one reader makes to its mapping do not reach the next reader. A changed file is read anew."""
    path = tmp_path / "nodes.yaml"
    path.write_text("node: {gpus: 8}")
    read_yaml(path)["node"]["gpus"] = 4
    assert read_yaml(path) == {"node": {"gpus": 8}}
    path.write_text("node: {gpus: 2}")
    assert read_yaml(path) == {"node": {"gpus": 2}}

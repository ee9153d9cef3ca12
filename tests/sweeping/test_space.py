"""Points of a sweep: which there are, in which order, and what is refused before any of them runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import simulator
from simulator.config import load_workload
from simulator.errors import InputError
from simulator.sweeping.reading import read_list, split_values, values_by_key
from simulator.sweeping.space import MOST_POINTS, Dimension, Space, grid, listed, zipped
from tests.support.jobs import job
from tests.support.sweeps import SMALLEST, space_of, write_job

#: A mapping that is its own value.
HOLDING_ITSELF: dict[str, Any] = {}
HOLDING_ITSELF["model"] = HOLDING_ITSELF


def changes_of(space: Space) -> list[tuple[Any, ...]]:
    return [tuple(point.changes.values()) for point in space.points()]


def test_a_grid_is_every_combination_and_the_last_key_is_the_fastest() -> None:
    space = space_of({"parallelism.tp": [1, 2], "seed": [5, 6, 7]})
    assert changes_of(space) == [(1, 5), (1, 6), (1, 7), (2, 5), (2, 6), (2, 7)]
    assert [point.number for point in space.points()] == list(range(len(space)))
    assert space.keys == ("parallelism.tp", "seed")


def test_zipped_keys_walk_together_beside_a_grid() -> None:
    space = Space(("w",), (*grid({"seed": [1, 2]}), *zipped({"parallelism.tp": [2, 4], "parallelism.pp": [4, 2]})))
    assert changes_of(space) == [(1, 2, 4), (1, 4, 2), (2, 2, 4), (2, 4, 2)]


def test_several_workloads_have_all_points_each_and_share_changes() -> None:
    space = Space(("a", "b"), grid({"seed": [1, 2]}), {"model.layers": 3})
    points = list(space.points())
    assert [point.workload for point in points] == ["a", "a", "b", "b"]
    assert all(point.changes["model.layers"] == 3 for point in points)
    assert space.keys == ("seed",)


def test_rows_of_a_list_may_leave_keys_out() -> None:
    space = Space(("w",), (listed([{"parallelism.tp": 2}, {"parallelism.pp": 2, "seed": 1}]),))
    assert [dict(point.changes) for point in space.points()] == [
        {"parallelism.tp": 2},
        {"parallelism.pp": 2, "seed": 1},
    ]
    assert space.keys == ("parallelism.tp", "parallelism.pp", "seed")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("1,2,4", ["1", "2", "4"]),
        ("[3,5],[4,4]", ["[3,5]", "[4,4]"]),
        ("none,{granularity: full, layers: 1}", ["none", "{granularity: full, layers: 1}"]),
        ("'a,b',\"c,d\"", ["'a,b'", '"c,d"']),
        ("[[1,2],{a: [3,4]}],5", ["[[1,2],{a: [3,4]}]", "5"]),
        ("1,", ["1", ""]),
    ],
)
def test_commas_in_brackets_and_quotes_belong_to_a_value(text: str, parts: list[str]) -> None:
    assert list(split_values(text)) == parts


def test_values_are_read_as_those_of_set() -> None:
    """YAML 1.2 says how: 300e9 is a number, null the default, and text stays text."""
    values = values_by_key(["a.b=300e9,null,1f1b,true", "c=[1, 2]"], "--grid")
    assert values == {"a.b": [300e9, None, "1f1b", True], "c": [[1, 2]]}


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["parallelism.tp"], "--grid: is not KEY=V1,V2"),
        (["parallelism..tp=1,2"], "--grid: is not KEY=V1,V2"),
        (["parallelism.tp="], "--grid parallelism.tp: has no value"),
        (["parallelism.tp=1,,2"], "--grid parallelism.tp: has no value"),
        (["parallelism.tp=1,[2"], "--grid parallelism.tp: line 1"),
        (["parallelism.tp=1", "parallelism.tp=2"], "--grid: parallelism.tp: is given twice"),
    ],
)
def test_a_text_that_is_no_list_of_values_is_refused(texts: list[str], words: str) -> None:
    with pytest.raises(InputError) as caught:
        values_by_key(texts, "--grid")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: grid({"seed": []}), "grid: seed: has no values"),
        (lambda: grid({"seed": 3}), "grid: seed: must be a list of values"),
        (lambda: grid({"seed": "12"}), "grid: seed: must be a list of values"),
        (lambda: grid({"seed": [1, 2, 1]}), "stands twice"),
        (lambda: zipped({"seed": [1, 2], "model.layers": [1]}), "seed: 2, model.layers: 1"),
        (lambda: listed([]), "points: lists no values"),
        (lambda: listed([{"model": {"layers": 1, 2: 3}}]), "points: cannot be written down"),
        (lambda: grid({"model": [HOLDING_ITSELF]}), "grid: cannot be written down"),
        (lambda: Space((HOLDING_ITSELF,), ()), "workloads: cannot be written down"),
        (lambda: Space(("w",), (), {"model": HOLDING_ITSELF}), "--set: cannot be written down"),
        (lambda: listed([{"seed": 1}, 4]), "points: point 2 is none"),  # type: ignore[list-item]
        (lambda: Space(("w",), grid({"seed": [1]}), {"seed": 2}), "grid: seed: is given by --set too"),
        (lambda: Space(("w",), (*grid({"seed": [1]}), *zipped({"seed": [2]}))), "zip: seed: is given by grid too"),
        (lambda: Space(("w",), grid({key: list(range(100)) for key in "abcde"})), f"at most {MOST_POINTS:,}"),
    ],
)
def test_no_values_twice_the_same_or_too_many_are_refused(make: Any, words: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("dimension", "place"),
    [
        (grid({"parallelism.tpp": [1, 2]}, "--grid")[0], "--grid: parallelism.tpp"),
        (zipped({"seed": [1], "parallelism.tpp": [1]}, "--zip")[0], "--zip: parallelism.tpp"),
        (listed([{"seed": 1}, {"parallelism.tpp": 1}], "points.csv"), "points.csv: parallelism.tpp"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_option_and_the_nearest_key(dimension: Dimension, place: str) -> None:
    with pytest.raises(InputError) as caught:
        Space((SMALLEST,), (dimension,)).check()
    assert f"{place}: unknown key" in str(caught.value)
    assert "fix:     tp instead of tpp" in str(caught.value)


@pytest.mark.parametrize(
    ("dimension", "words"),
    [
        (grid({"parallelism": [{"tp": 2}, {"tpp": 2}]}, "--grid")[0], "--grid: parallelism.tpp: unknown key"),
        (
            zipped({"seed": [1, 2], "training.recompute": ["full", {"granularty": "full"}]}, "--zip")[0],
            "--zip: training.recompute.granularty: unknown key",
        ),
        (
            listed([{"model": {"moe": {"experts": 2}}}, {"model": {"moe": {"expert": 2}}}], "p.yaml"),
            "p.yaml: model.moe.expert: unknown key",
        ),
    ],
)
def test_a_misspelt_key_in_any_value_is_refused(dimension: Dimension, words: str) -> None:
    """Keys inside of a later value are looked at too, and beside another dimension."""
    with pytest.raises(InputError) as caught:
        Space((SMALLEST,), (*grid({"calibration": ["a100-sxm-80gb"]}), dimension)).check()
    assert words in str(caught.value)


def test_values_with_the_same_keys_inside_are_looked_at_once() -> None:
    """Twenty mappings with the same two keys, a mapping with one of them, and texts have three forms."""
    values = [*({"granularity": "full", "layers": n} for n in range(20)), {"granularity": "full"}, "none", "full"]
    (dimension,) = grid({"training.recompute": values})
    assert [setting["training.recompute"] for setting in dimension.forms] == [values[0], values[20], "none"]


def test_a_misspelt_section_of_a_column_is_one_of_the_file() -> None:
    with pytest.raises(InputError) as caught:
        Space((SMALLEST,), (listed([{"modl.layers": 1}], "points.csv"),)).check()
    assert str(caught.value).startswith("points.csv: modl: unknown key")


def test_a_key_inside_what_has_none_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        space_of({"seed.x": [1, 2]}, {**SMALLEST, "seed": 3}).check()
    assert str(caught.value).startswith("grid seed.x: seed has no keys inside")


def test_values_may_be_an_array_or_a_range() -> None:
    space = space_of({"seed": np.array([1, 2]), "model.layers": range(1, 3)})  # type: ignore[dict-item]
    assert changes_of(space) == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert {type(value) for changes in changes_of(space) for value in changes} == {int}


def test_a_misspelt_key_of_set_is_one_of_set() -> None:
    with pytest.raises(InputError) as caught:
        Space((SMALLEST,), grid({"seed": [1]}), {"modl.layers": 2}).check()
    assert str(caught.value).startswith("--set: modl: unknown key")


def test_a_misspelt_key_is_refused_for_whichever_workload_lacks_it(tmp_path: Path) -> None:
    """Keys of a file itself are that file's."""
    path = write_job(tmp_path, trainin={"seq": 3})
    with pytest.raises(InputError) as caught:
        Space((SMALLEST, path), grid({"seed": [1]})).check()
    assert str(caught.value).startswith(f"{path}: trainin: unknown key")


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match="no such file"):
        Space((SMALLEST, "absent.yaml"), grid({"seed": [1]})).check()


def test_points_that_are_not_legal_are_no_reason_to_refuse_a_sweep() -> None:
    """Three divides no number of heads; the key is right."""
    Space((job(),), grid({"parallelism.tp": [3, 2]})).check()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.csv", "parallelism.tp, seed\n2,\n4,7\n"),
        ("p.yaml", "- {parallelism.tp: 2}\n- {parallelism.tp: 4, seed: 7}\n"),
    ],
)
def test_points_are_listed_in_a_table_or_in_yaml(name: str, text: str, tmp_path: Path) -> None:
    """An empty cell leaves the workload's own value."""
    path = tmp_path / name
    path.write_text(text)
    assert read_list(path, "--list") == [{"parallelism.tp": 2}, {"parallelism.tp": 4, "seed": 7}]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("p.csv", "a,b\n1\n", "line 2: has not as many cells"),
        ("p.csv", "a,a\n1,2\n", "is no head of a column"),
        ("p.csv", "a,\n1,2\n", "is no head of a column"),
        ("p.csv", "seed\n1\n" + 140_000 * "2" + "\n", "p.csv: line 3: cannot be read as CSV: field larger"),
        ("p.csv", 'seed,note\n1,x\n2,"abc\n3,y\n4,z\n', "p.csv: line 3: cannot be read as CSV: unexpected end"),
        ("p.csv", '"seed\n1\n2\n', "p.csv: line 1: cannot be read as CSV: unexpected end"),
        ("p.yaml", "- &x {parallelism.tp: *x}\n", "p.yaml: line 1, column 23: a value refers to itself by *x"),
        ("p.csv", "seed,training.zzz\n1,\n2, \n", "p.csv: training.zzz: all cells of this column are empty"),
        ("p.yaml", "a: 1\n", "must hold a list"),
        ("p.txt", "a: 1\n", "no list of points"),
    ],
)
def test_a_list_that_cannot_be_read_is_refused(name: str, text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_list(path, "--list")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"grid": {5: [1]}}, "grid: must be a mapping of keys"),
        ({"grid": [1]}, "grid: must be a mapping of keys"),
        ({"grid": 0}, "grid: must be a mapping of keys"),
        ({"zip": {None: [1]}}, "zip: must be a mapping of keys"),
        ({"points": 5}, "points: must be a list"),
        ({"points": {"seed": 1}}, "points: must be a list"),
        ({"grid": {"seed": [1]}, "set": {5: 1}}, "set: must be a mapping of keys"),
        ({"grid": {"seed": [1]}, "set": 3}, "set: must be a mapping of keys"),
        ({"grid": {"seed": [1]}, "out": 5}, "out: must be the path of a file"),
        ({"grid": {"seed": [1]}, "out": "a\0b"}, "out: cannot be a file"),
    ],
)
def test_options_of_another_type_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        simulator.sweep(SMALLEST, **options)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize("jobs", [0, -2, float("nan"), "2", 1.5, True])
def test_a_sweep_needs_a_process(jobs: Any) -> None:
    with pytest.raises(InputError, match="needs a process"):
        simulator.sweep(SMALLEST, grid={"seed": [1]}, jobs=jobs)


def test_a_loaded_workload_is_complete_and_cannot_be_swept() -> None:
    with pytest.raises(InputError, match="is no workload to sweep"):
        simulator.sweep(load_workload(SMALLEST), grid={"seed": [1]})  # type: ignore[arg-type]


def test_a_sweep_needs_a_workload() -> None:
    with pytest.raises(InputError, match="no workload"):
        simulator.sweep([], grid={"seed": [1]})

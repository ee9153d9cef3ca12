"""The suite of published collectives: rows as operations, what is scored apart, and that recorded errors come out."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path

import pytest

from simulator.cli.app import main
from simulator.config import load_cluster
from simulator.config.stack import load_stack
from simulator.errors import InputError
from simulator.validation import Bounds, collectives
from simulator.validation.collective_scores import (
    BOUND,
    BOUND_LARGE,
    LARGE_MESSAGE_BYTES,
    Prediction,
    compare,
    floor,
    geometric_mean,
    score,
)
from simulator.validation.collectives import (
    PARTS,
    CollectiveCase,
    alias_of,
    case_of,
    measured_s,
    printed_busbw_Bps,
    size_bytes,
)
from simulator.validation.errors import recorded
from simulator.validation.record import outcomes_of_collectives, predict_collective
from simulator.validation.rows import UnsupportedError

ROWS = {row["id"]: row for row in collectives.measurements()}
#: Hardware that the table knows and that is not simulated.
LACKING = {row["hardware"] for row in ROWS.values() if row["op"] == "p2p_latency"} | {
    "not stated in excerpt (NVLS-capable node)"
}


def case(row_id: str) -> CollectiveCase:
    return case_of(ROWS[row_id])


def test_every_hardware_has_an_alias_whose_cluster_and_stack_are_of_one_gpu() -> None:
    known = collectives.aliases().clusters
    for row in {row["hardware"]: row for row in ROWS.values()}.values():
        if row["hardware"] in LACKING:
            with pytest.raises(UnsupportedError, match=f"{re.escape(row['hardware'])}': "):
                alias_of(row)
            continue
        alias = alias_of(row)
        spec = load_cluster(known.get(alias.cluster, alias.cluster))
        if alias.stack is not None:
            assert (load_stack(alias.stack).gpu,) == spec.gpu_types, alias


def test_rows_by_hand() -> None:
    """8 B on 2 x 8 GPUs over EFA, 69.12 us; 16 GiB on 8 H200 at 275.59 GB/s of algbw; 1.6 GB on 2 x 4 V100 by ring."""
    p5 = case("comm-0062")
    assert (p5.op, p5.nbytes, p5.ranks, p5.cluster.nodes) == ("all_reduce", 8, tuple(range(16)), 2)
    assert p5.stack is not None
    assert p5.stack.name == "h100-efa"
    assert measured_s(ROWS["comm-0062"]) == pytest.approx(69.12e-6)
    h200 = next(row for row in ROWS.values() if "(NVLS)" in row["hardware"] and row["size"] == "17179869184")
    assert measured_s(h200) == pytest.approx(2**34 / (float(h200["algbw"]) * 1e9))
    v100 = case("comm-0530")
    assert (v100.nbytes, v100.algorithm, len(v100.ranks)) == (1.6e9, "ring", 8)
    assert v100.ranks == (0, 1, 2, 3, 8, 9, 10, 11)


def test_the_older_software_on_equal_hardware_has_a_stack_of_its_own() -> None:
    new, old = case("comm-0093"), case("comm-0098")
    assert new.cluster == old.cluster
    assert (new.stack and new.stack.name, old.stack and old.stack.name) == ("h100-efa", "h100-efa-old")


def test_trays_are_dealt_to_nvlink_domains() -> None:
    """128 GPUs in 32 trays are 64 of each of 2 racks; 4 in a tray are 4 of one rack."""
    racks, tray = case("comm-0110"), case("comm-0735")
    assert (racks.cluster.nodes, len(racks.ranks), racks.ranks[64]) == (2, 128, 72)
    assert (tray.cluster.nodes, tray.ranks) == (1, (0, 1, 2, 3))


def test_sizes() -> None:
    """DeepEP's tokens: 128 x 7168 x top-8 elements; FP8 with a float32 scale per 128 of them."""
    assert size_bytes(ROWS["comm-0247"]) == 128 * 7168 * 8 * 2
    assert size_bytes(ROWS["comm-0246"]) == 128 * 8 * (7168 + 4 * 56)
    assert size_bytes(ROWS["comm-0226"]) == 2**30
    with pytest.raises(UnsupportedError, match="no number of bytes"):
        size_bytes(ROWS["comm-0237"])


def test_rows_without_a_time_are_listed_with_the_reason_and_do_not_count() -> None:
    """A busbw alone is rounded to 0.01 GB/s, which is all of a small message's."""
    without = [row for row in ROWS.values() if not row["latency_us"] and not row["algbw"]]
    assert len(without) == 107
    (compared,) = compare([without[0]], lambda case: Prediction(1.0, "ring", "ll", 1.0))
    assert "neither a latency nor an algbw" in compared.outcome.skipped
    assert (compared.outcome.measured, compared.outcome.error) == (None, None)


def test_rows_that_cannot_be_simulated_say_why() -> None:
    reasons = {"comm-0227": "both directions", "comm-0268": "between CPUs", "comm-0825": "not said what it is"}
    for row_id, words in reasons.items():
        with pytest.raises(UnsupportedError, match=words):
            case(row_id)
    with pytest.raises(UnsupportedError, match="hardware 'a toaster'"):
        case_of({**ROWS["comm-0062"], "hardware": "a toaster"})
    with pytest.raises(UnsupportedError, match="not spread evenly"):
        case_of({**ROWS["comm-0062"], "n_gpus": "15"})
    with pytest.raises(UnsupportedError, match="algo 'Butterfly'"):
        case_of({**ROWS["comm-0062"], "algo": "Butterfly"})


def test_a_forced_algorithm_is_used() -> None:
    row = {**ROWS["comm-0530"], "algo": "Ring"}
    assert [predict_collective(case_of({**row, "algo": name})).algorithm for name in ("Ring", "Tree")] == [
        "ring",
        "tree",
    ]


def test_scores_and_floor_by_hand() -> None:
    """Two rows of one operation, 1 and 4 ms, predicted as 2: errors of a factor of 2 both; they are a factor of 2 from
    their own mean, and 4 from each other. A third, larger, is met."""
    small = {**ROWS["comm-0122"], "size": "1048576"}
    rows = [
        {**small, "id": "a", "latency_us": "1000"},
        {**small, "id": "b", "latency_us": "4000"},
        {**small, "id": "c", "latency_us": "2000", "size": str(2**30)},
        {**ROWS["comm-0226"], "id": "d"},
    ]
    compared = compare(rows, lambda case: Prediction(2e-3, "ring", "simple", 1.75))
    found = score(compared, Bounds(), name="own")
    assert found["geometric_mean"] == pytest.approx(2 ** (2 / 3) - 1)
    assert found["geometric_mean_large"] == pytest.approx(0)
    assert found["max_abs"] == pytest.approx(1)
    assert found["n_rows"] == 4
    assert [part["n"] for part in found["parts"][:3]] == [3, 0, 1]
    assert found["floor"]["groups"][0]["rows"] == ["a", "b"]
    assert found["floor"]["groups"][0]["spread"] == pytest.approx(3)
    assert floor(compared)["geometric_mean"] == pytest.approx(1)
    assert found["passed"] is None
    assert score(compared, Bounds(), name=collectives.NAME)["passed"] is False
    assert geometric_mean([]) is None


def errors(row_ids: list[str]) -> dict[str, float]:
    found = outcomes_of_collectives([ROWS[row_id] for row_id in row_ids])
    return {row.outcome.id: row.outcome.error for row in found if row.outcome.error is not None}


SOME = [
    "comm-0050",
    "comm-0080",
    "comm-0098",
    "comm-0122",
    "comm-0141",
    "comm-0160",
    "comm-0330",
    "comm-0651",
    "comm-0735",
]


def test_what_is_recorded_is_what_comes_out() -> None:
    some = [row_id for row_id in SOME if row_id in ROWS]
    assert len(some) > 5
    own = recorded()[collectives.NAME]
    found = errors(some)
    assert found == pytest.approx({row: own[row] for row in found}, abs=2e-6)


@pytest.mark.slow
def test_all_that_is_recorded_is_what_comes_out() -> None:
    assert errors(list(ROWS)) == pytest.approx(recorded()[collectives.NAME], abs=2e-6)


def test_recorded_errors_keep_the_bounds() -> None:
    """Of the collectives; what is scored apart is recorded too. Nine rows of ten that have a time are predicted."""
    own = recorded()[collectives.NAME]
    logs, large = [], []
    for row_id, error in own.items():
        found = case(row_id)
        if found.part == PARTS[0]:
            logs.append(math.log1p(error))
            if found.nbytes > LARGE_MESSAGE_BYTES:
                large.append(logs[-1])
    assert (geometric_mean(logs) or 1) <= BOUND
    assert (geometric_mean(large) or 1) <= BOUND_LARGE
    timed = [row for row in ROWS.values() if row["latency_us"] or row["algbw"]]
    assert len(own) >= 0.9 * len(timed)


def write(path: Path, rows: list[dict[str, str]]) -> str:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def test_a_user_s_own_rows(tmp_path: Path) -> None:
    """In the same columns; a shipped cluster and stack may be named. Without bounds nothing fails."""
    own = {**ROWS["comm-0122"], "hardware": "ours", "cluster": "dgx_a100", "stack": "a100-nvswitch"}
    rows = [own, {**own, "id": "two", "size": "many"}]
    out = tmp_path / "out.json"
    table = write(tmp_path / "own.csv", rows)
    arguments = ["validate", "collectives", "--rows", table, "--json", str(out), "--quiet"]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    (suite,) = json.loads(out.read_text())["suites"]
    assert (suite["suite"], suite["n_rows"], suite["n_skipped"], suite["passed"]) == ("own", 2, 1, None)
    assert suite["rows"][0]["error"] == pytest.approx(recorded()[collectives.NAME]["comm-0122"], abs=2e-6)
    assert "no number of bytes" in suite["rows"][1]["skipped"]


def test_a_table_of_steps_is_no_table_of_collectives(tmp_path: Path) -> None:
    table = write(tmp_path / "steps.csv", [{"id": "1", "layers": "3"}])
    with pytest.raises(InputError, match=r"lacks columns: op, size.*"):
        collectives.measurements(Path(table))


@pytest.mark.parametrize(
    ("hardware", "cluster", "stack"),
    [
        ("4x A100 one node", "dgx_a100", "a100-vtrain"),
        ("8x H100 (ND H100 v5)", "azure_nd_h100_v5", None),
        ("2x GCP A4 (8x B200, 8x400G CX-7)", "gcp_a4", "b200-dranet"),
        ("2x GCP A3 Ultra (8x H200)", "gcp_a3_ultra", None),
        ("8x H200 (ND H200 v5)", "dgx_h200", "h200-nvswitch"),
        ("A4X GB200 NVL72", "gb200_nvl72", "gb200-oci"),
        ("2x p5.48xlarge", "aws_p5", "h100-efa"),
    ],
)
def test_hardware_in_other_words(hardware: str, cluster: str, stack: str | None) -> None:
    alias = alias_of({**ROWS["comm-0062"], "hardware": hardware})
    assert (alias.cluster, alias.stack) == (cluster, stack)


def test_a_busbw_of_a_small_message_is_a_rounded_zero() -> None:
    assert printed_busbw_Bps({"busbw": "0.00"}) is None
    assert printed_busbw_Bps({"busbw": "0.05"}) == 0.05e9

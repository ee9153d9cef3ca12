"""`python -m calibration fit`: from measurements to a profile, and that the shipped one follows from its own."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from calibration.__main__ import main
from calibration.fit import attention, kernels, matmul, memory
from calibration.fit.cases import Cases, MeasuredCase, read
from calibration.fit.command import fit
from calibration.fit.part import FittedPoint, every_second, residuals, search
from calibration.fit.writer import written
from simulator.config.profile import load_profile
from simulator.config.section import as_data
from simulator.config.validation import validated
from simulator.costs import Costs
from simulator.costs.matmul import MatmulCost, Products
from simulator.errors import InputError
from simulator.hardware.kernels import MatmulModel
from simulator.program import Matmul, Memory
from tests.support.fitting import CHOICES, ENVIRONMENT, SHARED, measured_case

ROOT = Path(__file__).parents[2]

H100 = ROOT / "calibration" / "measurements" / "h100-sxm-80gb"

A100_PRODUCTS = ROOT.parent / "shared/reference/files/gemm_perf/aiconfigurator_a100_sxm_gemm.csv.gz"

A100_COLLECTIVES = A100_PRODUCTS.parents[1] / "nccl_perf/aiconfigurator_a100_sxm_nccl2.27.3.csv"


def test_the_search_finds_a_minimum_within_limits() -> None:
    """|log x/3| + |log y/0.2| has its minimum at (3, 0.2); with y of at least 0.5 it is at the limit."""

    def loss(c: dict[str, float]) -> float:
        return abs(math.log(c["x"] / 3)) + abs(math.log(c["y"] / 0.2))

    found = search({"x": 1.0, "y": 1.0}, loss)
    assert found == pytest.approx({"x": 3.0, "y": 0.2}, rel=0.01)
    assert search({"x": 1.0, "y": 1.0}, loss, limits={"y": (0.5, 1.0)})["y"] == 0.5


def test_every_second_size_is_held_out_with_all_that_have_it() -> None:
    fitted, held_out = every_second([(size, role) for size in (4, 1, 2, 8, 16) for role in "ab"], lambda item: item[0])
    assert {size for size, _ in fitted} == {1, 4, 16}
    assert {size for size, _ in held_out} == {2, 8}
    assert len(fitted) == 6


def test_residuals_are_of_classes_and_groups() -> None:
    """Errors +10 % and -30 %: mean 20 %, largest 30 %, bias -10 %; the class has the held-out group too.

    What fits itself is not counted.
    """
    points = [
        FittedPoint("a.x", 1, 1.0, 1.1, False),
        FittedPoint("a.x", 2, 1.0, 0.7, False),
        FittedPoint("a.y", 2, 1.0, 1.5, True),
    ]
    exact = [
        FittedPoint("a.x", 3, 1.0, 1.0, False, fits_itself=True),
        FittedPoint("a.z", 3, 1.0, 1.0, False, fits_itself=True),
    ]
    table = residuals([*points, *exact])
    assert "a.z" not in table
    assert table["a.x"] == {"fitted": {"n": 2, "mean": 0.2, "max": 0.3, "bias": -0.1}}
    assert table["a"]["held_out"] == {"n": 1, "mean": 0.5, "max": 0.5, "bias": 0.5}


def test_kernels_that_obey_the_model_give_its_constants_back() -> None:
    """Cases priced by a profile of other constants: what is fitted prices the same, to the search's resolution. Our own
    are under the power limit, also where nothing told what the GPU drew."""
    base = load_profile("h100-sxm-80gb")
    curve = replace(base.kernels.memory.eager["dropout"], share=0.5, start_s=9e-6)
    sizes = [2.0**power for power in range(20, 31)]
    peak = base.gpu_spec.memory_bandwidth_Bps.value
    rows = [measured_case("memory", "dropout", curve.start_s + size / (0.5 * peak), bytes=size) for size in sizes]
    figures = memory.fit(Cases(tuple(rows), (ENVIRONMENT,)), base).figures["kernels.memory.eager"]
    assert figures["dropout"]["share"] == pytest.approx(0.5, rel=0.01)
    assert figures["dropout"]["start_s"] == pytest.approx(9e-6, rel=0.03)
    assert figures["copy"] == as_data(base.kernels.memory.eager["copy"])  # not measured: as before

    true = matmul._with(base.kernels.matmul, {"sustained_flops_per_s.bf16.value": 500e12, "start_s": 8e-6})
    kernels = [Matmul(m, n, k) for m in (256, 1024, 4096, 8192) for n in (512, 4096, 8192) for k in (512, 4096)]
    seconds = MatmulCost(base.gpu_spec, true).lasting_seconds(Products.from_kernels(kernels))
    rows = [
        measured_case("matmul", "mm", float(s), m=x.m, n=x.n, k=x.k, role="fwd", dtype="bf16")
        for x, s in zip(kernels, seconds, strict=True)
    ]
    part = matmul.fit(Cases(tuple(rows), (ENVIRONMENT,)), base)
    found = MatmulCost(base.gpu_spec, validated(MatmulModel, part.figures["kernels.matmul"]))
    for product in (Matmul(256, 512, 512), Matmul(16384, 16384, 16384)):  # all start, all power limit
        assert found.seconds(product) == pytest.approx(MatmulCost(base.gpu_spec, true).seconds(product), rel=0.1)
    assert np.mean([abs(point.error) for point in part.points]) < 0.05


def test_types_that_a_gpu_does_not_have_are_left_out() -> None:
    """A V100 emulates bf16: what it does so is no speed of its own."""
    base = load_profile("v100-sxm-32gb")
    rows = [
        measured_case("matmul", "mm", 1e-5 + 2.0 * size**3 / 90e12, m=size, n=size, k=size, role="fwd", dtype=dtype)
        for dtype in ("bf16", "fp16")
        for size in (512, 1024, 2048, 4096)
    ]
    rows.append(
        MeasuredCase("shared", "mm", rows[0].params | {"beside": "wait", "share": 0.5, "period_s": 0.02}, (0,), SHARED)
    )
    profile, points = fit(Cases(tuple(rows), (ENVIRONMENT | {"gpu": "Tesla V100-SXM2-32GB"},)), base, "mine")
    assert {point.group for point in points} == {"matmul.fp16.fwd"}
    assert set(profile.kernels.matmul.sustained_flops_per_s) == set(base.kernels.matmul.sustained_flops_per_s)


@pytest.fixture(scope="module")
def refitted() -> tuple[object, list[FittedPoint]]:
    """The H100's kernels fitted anew."""
    cases = read(H100 / "one-gpu.jsonl.gz")
    base = load_profile("h100-sxm-80gb")
    parts = [one.fit(cases, base) for one in (matmul, attention, memory)]
    return {key: value for part in parts for key, value in part.figures.items()}, [
        p for part in parts for p in part.points
    ]


@pytest.mark.slow
def test_the_shipped_profile_is_what_its_measurements_give(refitted) -> None:
    """The same constants and residuals, to what arithmetic differs by between machines."""
    figures, points = refitted
    shipped = load_profile("h100-sxm-80gb")
    kernels = as_data(shipped.kernels)
    for key, value in figures.items():
        section = kernels
        for name in key.split(".")[1:]:
            section = section[name]
        assert _numbers(section) == pytest.approx(_numbers(value), rel=0.02), key
    anew = residuals(points)
    for name in ("matmul", "attention", "memory"):
        for half in ("fitted", "held_out"):
            assert getattr(shipped.residuals[name], half).mean == pytest.approx(anew[name][half]["mean"], abs=0.002)


@pytest.mark.parametrize("name", ["h100-sxm-80gb", "h200-sxm-141gb"])
def test_shipped_profiles_are_written_as_fit_writes_them(name: str) -> None:
    """Else a fit anew would differ from them in more than what is new."""
    path = Path(__file__).resolve().parents[2] / "calibration/profiles" / f"{name}.yaml"
    assert written(load_profile(name)) == path.read_text()


def test_what_weighs_and_adds_up_experts_outputs_gives_the_shipped_constants() -> None:
    """Of an H200; where all have one number of rows a token, bytes are not told from elements, and the base's stay."""
    cases, shipped = read(CHOICES), load_profile("h200-sxm-141gb")
    eager = shipped.kernels.memory.eager
    blank = {name: replace(curve, share=0.5, element_s=1e-12) for name, curve in eager.items()}
    parts = {"memory": replace(shipped.kernels.memory, eager=blank)}
    base = replace(shipped, kernels=replace(shipped.kernels, **parts))
    found = memory.fit(cases, base).figures["kernels.memory.eager"]
    for name in ("weigh", "combine"):
        assert _numbers(found[name]) == pytest.approx(_numbers(as_data(eager[name])), rel=0.02)
    of_two = [case for case in cases.rows if case.params.get("top_k", 2) == 2 and case.op != "choices_weigh_bwd"]
    kept = memory.fit(Cases(tuple(of_two), cases.environments), base).figures["kernels.memory.eager"]
    assert kept["combine"] == as_data(blank["combine"])


@pytest.mark.parametrize(("kernels", "most"), [("matmul", 0.05), ("attention", 0.06), ("memory", 0.06)])
def test_shipped_figures_were_near_what_was_measured_and_not_fitted(kernels: str, most: float) -> None:
    """Mean error, as the fit left it in the profile, which a slow test fits anew."""
    held_out = load_profile("h100-sxm-80gb").residuals[kernels].held_out
    assert held_out is not None
    assert held_out.n > 20
    assert held_out.mean < most


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "most"),
    [("matmul", 0.05), ("matmul.bf16", 0.05), ("matmul.fp8", 0.05), ("attention", 0.06), ("memory", 0.06)],
)
def test_held_out_kernels_are_near_what_was_measured(refitted, group: str, most: float) -> None:
    """Mean error of what was not fitted."""
    errors = [abs(point.error) for point in refitted[1] if point.held_out and f"{point.group}.".startswith(f"{group}.")]
    assert len(errors) > 20
    assert np.mean(errors) < most


@pytest.mark.slow
@pytest.mark.skipif(not A100_PRODUCTS.exists(), reason="the measured products are not beside this checkout")
def test_the_shipped_a100_is_what_the_published_tables_give() -> None:
    """To what arithmetic differs by between machines; products and collectives have their errors in the file."""
    tables = [read(path) for path in (A100_PRODUCTS, A100_COLLECTIVES)]
    shipped = load_profile("a100-sxm-80gb")
    profile, _ = fit(Cases(tuple(case for table in tables for case in table.rows), ()), shipped, shipped.name)
    assert _numbers(as_data(profile)) == pytest.approx(_numbers(as_data(shipped)), rel=0.02, abs=2e-3)
    assert {name.split(".")[0] for name in shipped.residuals} == {"matmul", "collectives"}
    assert shipped.residuals["matmul"].held_out.mean < 0.08
    assert shipped.residuals["collectives"].held_out.mean < 0.06


@pytest.mark.skipif(not A100_PRODUCTS.exists(), reason="the measured products are not beside this checkout")
def test_an_a100_s_products_are_within_the_error_that_its_profile_claims() -> None:
    """Short runs, without the power limit: 7 % over all held-out sizes that take 10 us, 4 % from 50 GFLOP."""
    profile = load_profile("a100-sxm-80gb")
    cases = [case for case in read(A100_PRODUCTS).rows_of("matmul") if case.seconds > matmul.SHORT_S]
    _, held_out = every_second(cases, lambda case: matmul.kernel_of(case).flops)
    products = Products.from_kernels([matmul.kernel_of(case) for case in held_out])
    burst = MatmulCost(profile.gpu_spec, profile.kernels.matmul).burst_seconds(products)
    errors = np.abs(burst / np.array([case.seconds for case in held_out]) - 1)
    assert errors.mean() < 0.07
    assert errors[products.flops > 5e10].mean() < 0.04


def test_the_command_writes_a_profile_that_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [ENVIRONMENT]
    for power in range(20, 30):
        row = {"kind": "memory", "op": "copy", "params": {"rows": 2**power // 2048, "width": 1024}, "ranks": [0]}
        lines.append({**row, "bytes": 2.0**power, "time_s": 3e-6 + 2.0**power / 3e12})
    lines.append({"kind": "memory", "op": "copy", "params": {"rows": 1, "width": 1}, "ranks": [0], "error": "no"})
    (tmp_path / "m.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    out = tmp_path / "mine.yaml"
    arguments = ["fit", str(tmp_path), "--out", str(out), "--base", "h100-sxm-80gb", "--plots", str(tmp_path / "plots")]
    assert main(arguments) == 0
    profile, base = load_profile(out), load_profile("h100-sxm-80gb")
    assert (profile.name, profile.gpu, profile.date) == ("mine", "h100-sxm-80gb", "2026-01-02")
    assert profile.provenance.gpu == ENVIRONMENT["gpu"]
    assert profile.residuals["memory.copy"].fitted.n == 5
    assert Costs.from_profile(profile).kernel_s(Memory("copy", 1e9, 2e9), profile.gpu) == pytest.approx(
        1.003e-3, rel=0.01
    )
    assert profile.kernels.attention == base.kernels.attention
    assert "memory.copy" in capsys.readouterr().err
    assert (tmp_path / "plots" / "memory.png").stat().st_size > 1000


@pytest.mark.parametrize("name", ["a100-sxm-80gb", "h100-sxm-80gb"])
def test_a_written_profile_is_the_same_to_four_digits(name: str, tmp_path: Path) -> None:
    profile = load_profile(name)
    path = tmp_path / "again.yaml"
    path.write_text(written(profile))
    again = load_profile(path)
    assert _numbers(as_data(again)) == pytest.approx(_numbers(as_data(profile)), rel=1e-3)
    assert written(again) == written(profile)


def test_measurements_that_are_none_or_of_another_gpu_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no measurements"):
        read(tmp_path)
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="no table"):
        read(tmp_path)
    (tmp_path / "a.csv").unlink()
    (tmp_path / "a.jsonl").write_text('{"kind": "memory"}\n')
    with pytest.raises(InputError, match="line 1"):
        read(tmp_path)
    with pytest.raises(InputError, match="another GPU"):
        fit(Cases((), (ENVIRONMENT,)), load_profile("a100-sxm-80gb"), "mine")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rtx-4090-24gb", "NVIDIA GeForce RTX 4090"),
        ("mi300x-192gb", "AMD Instinct MI300X"),
        ("a100-pcie-80gb", "NVIDIA A100 80GB PCIe"),
    ],
)
def test_measurements_of_a_profile_s_gpu_are_taken(name: str, said: str) -> None:
    profile, _ = fit(Cases((), (ENVIRONMENT | {"gpu": said},)), load_profile(name), "mine")
    assert profile.provenance.gpu == said


@pytest.mark.parametrize(
    ("machines", "nvls"),
    [([(1, True), (2, False)], False), ([(2, False), (1, True)], False), ([(2, True)], True), ([(1, True)], None)],
)
def test_switches_that_sum_up_are_those_of_machines_with_several_gpus(
    machines: list[tuple[int, bool]], nvls: bool | None
) -> None:
    """The order of their files does not matter."""
    environments = tuple(ENVIRONMENT | {"ranks": ranks, "nvls": told} for ranks, told in machines)
    profile, _ = fit(Cases((), environments), load_profile("h100-sxm-80gb"), "mine")
    assert profile.provenance.nvls == nvls


def test_published_tables_become_cases(tmp_path: Path) -> None:
    """Milliseconds and elements of two bytes; of collectives that were measured twice the median."""
    (tmp_path / "g.csv").write_text("m,n,k,latency\n8,16,32,2.0\n")
    (tmp_path / "n.csv").write_text(
        "op_name,nccl_dtype,num_gpus,message_size,latency\n"
        "alltoall,half,4,512,1.0\nalltoall,half,4,512,3.0\nalltoall,int8,4,512,9.0\n"
    )
    cases = read(tmp_path)
    (product,) = cases.rows_of("matmul")
    assert (matmul.kernel_of(product), product.seconds) == (Matmul(8, 16, 32), 2e-3)
    (collective,) = cases.rows_of("collective")
    assert (collective.op, len(collective.ranks), collective.row["bytes"], collective.seconds) == (
        "all_to_all",
        4,
        1024,
        2e-3,
    )
    assert cases.cited == {}


def _numbers(value: object, key: str = "") -> dict[str, float]:
    """All numbers of nested plain data by dotted key."""
    if isinstance(value, dict):
        return {k: v for name, inner in value.items() for k, v in _numbers(inner, f"{key}.{name}").items()}
    if isinstance(value, list | tuple):
        return {k: v for index, inner in enumerate(value) for k, v in _numbers(inner, f"{key}.{index}").items()}
    return {key: float(value)} if isinstance(value, int | float) and not isinstance(value, bool) else {}


def test_the_gap_between_kernels_is_what_a_profiler_does_not_see() -> None:
    """Runs of 5, 8 and 11 us whose kernels a profiler adds up to 4, 6 (two of them) and 9 us: gaps of 1, 1 and 2 us, 1
    in the median; a run of 50 us is too long to tell, and one that was not timed says nothing."""
    rows = []
    for width, time_s, seconds in ((1, 5e-6, [4e-6]), (2, 8e-6, [2e-6, 4e-6]), (3, 11e-6, [9e-6]), (4, 5e-5, [1e-5])):
        params = {"rows": 8, "width": width}
        row = {"kind": "memory", "op": "copy", "params": params, "ranks": [0], "time_s": time_s}
        rows.append(MeasuredCase("memory", "copy", params, (0,), row))
        of = {"of": f"memory/copy rows=8 width={width}"}
        rows.append(MeasuredCase("kernels", "memory", of, (0,), {"kernels": [["copy", one] for one in seconds]}))
    rows.append(
        MeasuredCase("kernels", "memory", {"of": "memory/copy rows=9 width=9"}, (0,), {"kernels": [["copy", 1e-6]]})
    )
    found = kernels._gap(Cases(tuple(rows), (ENVIRONMENT,)))
    assert found["kernels.gap_s"]["value"] == pytest.approx(1e-6)
    assert kernels._gap(Cases(tuple(rows[::2]), (ENVIRONMENT,))) == {}

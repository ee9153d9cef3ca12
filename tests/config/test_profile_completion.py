"""Profiles of GPUs that nobody has measured: short files, completed from the profile of a GPU like them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import simulator
from simulator.config import catalog
from simulator.config.profile import load_profile
from simulator.config.section import as_data
from simulator.costs import Costs
from simulator.errors import InputError
from simulator.hardware.profile import Profile
from simulator.program import Attention, Matmul, Memory
from simulator.validation import read_rows
from simulator.validation.rows import workload_of
from simulator.validation.suites import SUITES
from tests.support.grids import one_in

PROFILES = catalog.names("profile")
SHORT = [name for name in PROFILES if load_profile(name).like]
#: NVLink of a GPU in bytes/s per direction (data sheets), and what it joins.
LINKS = {
    "a10-24gb": (0.0, "none"),
    "a100-pcie-80gb": (300e9, "pairs"),
    "a100-sxm-40gb": (300e9, "nvswitch"),
    "a100-sxm-80gb": (300e9, "nvswitch"),
    "a10g-24gb": (0.0, "none"),
    "a40-48gb": (0.0, "none"),
    "b200-sxm-180gb": (900e9, "nvswitch"),
    "b300-sxm-288gb": (900e9, "nvswitch"),
    "gb200-186gb": (900e9, "nvswitch"),
    "gb300-288gb": (900e9, "nvswitch"),
    "gh200-480gb": (0.0, "none"),
    "h100-nvl-94gb": (300e9, "pairs"),
    "h100-pcie-80gb": (300e9, "pairs"),
    "h100-sxm-80gb": (450e9, "nvswitch"),
    "h100-sxm-96gb-500w": (450e9, "nvswitch"),
    "h20-sxm-96gb": (450e9, "nvswitch"),
    "h200-sxm-141gb": (450e9, "nvswitch"),
    "h800-sxm-80gb": (200e9, "nvswitch"),
    "l4-24gb": (0.0, "none"),
    "l40s-48gb": (0.0, "none"),
    "mi300x-192gb": (448e9, "mesh"),
    "mi325x-256gb": (448e9, "mesh"),
    "mi355x-288gb": (537.6e9, "mesh"),
    "rtx-3080-10gb": (0.0, "none"),
    "rtx-3090-24gb": (0.0, "none"),
    "rtx-4090-24gb": (0.0, "none"),
    "rtx-5090-32gb": (0.0, "none"),
    "rtx-6000-ada-48gb": (0.0, "none"),
    "rtx-a6000-48gb": (0.0, "none"),
    "rtx-pro-6000-96gb": (0.0, "none"),
    "t4-16gb": (0.0, "none"),
    "v100-sxm-16gb": (150e9, "mesh"),
    "v100-sxm-32gb": (150e9, "mesh"),
}


def job(gpu: str, precision: str) -> dict[str, object]:
    bandwidth, kind = LINKS[gpu]
    node = {"gpus": {"type": gpu}, "nvlink": {"kind": kind, "bandwidth_Bps": bandwidth, "sharp": False}}
    return {
        # Heads of 256, whose attention nobody has published.
        "model": {"layers": 2, "hidden": 1024, "heads": 4, "vocab": 32000},
        "training": {"seq": 1024, "micro_batch": 1, "global_batch": 8, "precision": precision},
        "parallelism": {"tp": 2, "dp": 4},
        "cluster": {"name": "dgx_h100", "node": node},
    }


@pytest.mark.parametrize("gpu", one_in(2, PROFILES))
def test_every_shipped_profile_runs_a_job_and_says_what_it_rests_on(gpu: str) -> None:
    """The kinds of the prices add up to all kernel time; what was measured on no such GPU is outside all that was."""
    result = simulator.run(job(gpu, "fp16" if gpu.startswith(("v100", "t4")) else "bf16"))
    report, profile = result.to_dict(), load_profile(gpu)
    assert report["calibration"]["kind"] == profile.kind
    assert report["memory"]["capacity_bytes"] == profile.gpu_spec.memory_bytes.value
    priced = dict(report["calibration"]["kernel_time_priced_by"])
    outside = priced.pop("extrapolated")
    assert sum(priced.values()) == pytest.approx(1)
    assert outside >= priced.get("assumed", 0)
    if profile.like:
        assert profile.kind == "datasheet"
        assert priced == {"assumed": pytest.approx(1)}
        assert f"profile {profile.like} of" in report["calibration"]["source"]


@pytest.mark.parametrize(("row", "measured_s"), [("simumax-b200-028", 0.2588), ("simumax-b200-011", 0.7656)])
def test_steps_of_a_b200_are_near_published_ones_with_nothing_tuned(row: str, measured_s: float) -> None:
    """SimuMax's Llama layers with tp 8 and with tp 4 x dp 2 on 8 B200s; docs/limits.md has all of them."""
    suite = SUITES["simumax-b200"]
    (given,) = (one for one in read_rows(suite.table) if one["id"] == row)
    step_s = simulator.run(workload_of(given, suite.settings_of(given))).to_dict()["step_time_s"]
    assert step_s == pytest.approx(measured_s, rel=0.1)


def test_a_v100_trains_in_no_precision_that_it_lacks() -> None:
    with pytest.raises(InputError, match="v100-sxm-32gb has no matrix units") as caught:
        simulator.run(job("v100-sxm-32gb", "bf16"))
    assert (caught.value.key, caught.value.allowed) == ("training.precision", "fp16, fp32")


def test_an_optimizer_that_multiplies_in_bf16_is_refused_where_a_gpu_lacks_it() -> None:
    """Muon's products are in bf16, whatever the precision of the passes."""
    plain = job("v100-sxm-32gb", "fp16")
    simulator.check(plain)
    muon = plain | {"training": plain["training"] | {"optimizer": {"name": "muon"}}}
    with pytest.raises(InputError, match="its products are in bf16, for which v100-sxm-32gb") as caught:
        simulator.check(muon)
    assert caught.value.key == "training.optimizer.name"
    assert "adamw" in caught.value.allowed.split(", ")


@pytest.mark.parametrize("name", SHORT)
def test_a_short_profile_stays_short(name: str) -> None:
    """One that has published times of kernels too, as the B200's, has a line for each head size."""
    assert len((catalog.FOLDERS["profile"] / f"{name}.yaml").read_text().splitlines()) <= 64


def twice(tmp_path: Path, **own: object) -> Profile:
    """An H100 with twice the memory bandwidth, thrice the FLOP/s, half the SMs, and figures of its ``own``."""
    base = load_profile("h100-sxm-80gb")
    spec = as_data(base.gpu_spec, nulls=False)
    spec["sms"] //= 2
    spec["memory_bandwidth_Bps"]["value"] *= 2
    for peak in spec["peak_flops_per_s"].values():
        peak["value"] *= 3
    data = {
        "schema_version": 1,
        "name": "twice",
        "gpu": base.gpu,
        "date": "2026-01-02",
        "kind": "datasheet",
        "like": "h100-sxm-80gb",
        "sources": {"datasheet": "a sheet", "devicequery": "a query", "paper": "a paper"},
        "gpu_spec": spec,
        **own,
    }
    path = tmp_path / "twice.yaml"
    path.write_text(yaml.safe_dump(data))
    return load_profile(path)


def test_shares_and_times_stay_and_rates_go_with_their_peak(tmp_path: Path) -> None:
    """Memory-bound kernels take half as long beyond their start. A large product takes a
    third, as its tiles and its power limit are three times as fast; attention that keeps all SMs busy too."""
    base, other = load_profile("h100-sxm-80gb"), twice(tmp_path)
    was, now = base.kernels.matmul, other.kernels.matmul
    assert now.tile_efficiency == was.tile_efficiency
    assert (now.wave_start_s, now.memory_fraction, now.start_s) == (was.wave_start_s, was.memory_fraction, was.start_s)
    assert now.store_Bps_per_sm == pytest.approx(4 * was.store_Bps_per_sm)  # twice the memory for half as many SMs
    assert now.load_Bps_per_sm == pytest.approx(4 * was.load_Bps_per_sm)
    assert now.split_sum_Bps == pytest.approx(2 * was.split_sum_Bps)
    for name, link in base.transports.items():
        taken = other.transports[name]
        assert (taken.efficiency, taken.protocols, taken.p2p) == (link.efficiency, link.protocols, link.p2p)
        assert taken.copy_Bps == pytest.approx(2 * link.copy_Bps)
    assert other.host.launch_s["eager"].forward_s == base.host.launch_s["eager"].forward_s
    seconds = [
        [Costs.from_profile(profile).kernel_s(kernel, base.gpu) for profile in (base, other)]
        for kernel in (Matmul(32768, 32768, 32768), Attention(8, 64, 64, 16384, 16384, 128), Memory("copy", 1e10, 1e10))
    ]
    assert [before / after for before, after in seconds] == pytest.approx([3, 3, 2], rel=0.02)


def test_what_is_taken_over_is_assumed_and_never_measured(tmp_path: Path) -> None:
    other = twice(tmp_path)
    taken = [figure for key, figure in other.cited() if not key.startswith("gpu_spec")]
    assert {(figure.kind, figure.source) for figure in taken} == {("assumed", "h100-sxm-80gb")}
    assert {figure.note for figure in taken} == {"as h100-sxm-80gb"}
    assert other.residuals == {}
    assert other.provenance is None
    for kernel in (Matmul(4096, 4096, 4096), Attention(1, 32, 32, 4096, 4096, 128), Memory("copy", 1e8, 1e8)):
        assert Costs.from_profile(other).origin(kernel).extrapolated


def test_a_figure_of_the_file_s_own_wins_and_names_its_source(tmp_path: Path) -> None:
    """A table of numbers inside a figure (the widths of a norm) is replaced whole; neighbours stay."""
    own = {"kind": "published", "source": "paper"}
    profile = twice(
        tmp_path,
        kernels={
            "memory": {"eager": {"norm": {"share": 0.5, "by_width": {}, **own}}},
            "matmul": {"sustained_flops_per_s": {"bf16": {"value": 9e14, **own}}},
        },
        transports={"nvlink": {"efficiency": 0.6, "note": "table 1", **own}},
    )
    memory, base = profile.kernels.memory.eager, load_profile("h100-sxm-80gb").kernels.memory.eager
    assert (memory["norm"].share, memory["norm"].by_width, memory["norm"].kind) == (0.5, {}, "published")
    assert memory["norm"].start_s == base["norm"].start_s
    assert memory["norm"].note == "the rest as h100-sxm-80gb"
    assert memory["copy"].share == base["copy"].share
    assert profile.kernels.matmul.sustained_flops_per_s["bf16"].kind == "published"
    assert profile.kernels.matmul.sustained_flops_per_s["fp8"].kind == profile.kernels.matmul.kind == "assumed"
    assert profile.transports["nvlink"].efficiency == 0.6
    assert profile.transports["nvlink"].note == "table 1; the rest as h100-sxm-80gb"


def test_a_part_may_be_as_that_of_a_third_profile(tmp_path: Path) -> None:
    """A B200's attention is taken as shares of peaks, assumed, with its profile as source. Copies stay an H100's."""
    third, base = load_profile("b200-sxm-180gb"), load_profile("h100-sxm-80gb")
    profile = twice(tmp_path, kernels={"attention": {"like": "b200-sxm-180gb"}})
    taken, given = profile.kernels.attention.forward[128], third.kernels.attention.forward[128]
    assert (taken.limit, taken.half_length) == (given.limit, given.half_length)
    assert (taken.kind, taken.source, taken.fitted_range) == ("assumed", "b200-sxm-180gb", None)
    assert profile.sources["b200-sxm-180gb"].startswith("profile b200-sxm-180gb of ")
    assert profile.kernels.memory.eager["copy"].share == base.kernels.memory.eager["copy"].share


def test_without_nvswitch_nccl_is_assumed_to_hold_no_sms(tmp_path: Path) -> None:
    """Shares of the memory that are left to communication stay as in the other profile."""
    held, base = twice(tmp_path, interference="without_nvswitch").interference, load_profile("h100-sxm-80gb")
    assert (held.sms.collective, held.sms.p2p, held.matmul_sms) == (0, 0, 0)
    assert (held.kind, held.source) == ("assumed", "without_nvswitch")
    assert held.leaves.norm == base.interference.leaves.norm


@pytest.mark.parametrize(
    ("own", "key", "says"),
    [
        ({"kernels": {"attention": {"like": "a10-24gb"}}}, "kernels.attention.like", "no kernels.attention"),
        ({"kernels": {"attention": {"like": "b2"}}}, "kernels.attention.like", "no profile file of this name"),
        ({"kernels": {"attention": {"like": 3}}}, "kernels.attention.like", "no profile file of this name"),
        ({"interference": "without_switches"}, "interference", "must be a mapping"),
        ({"transports": {"nvlink": {"efficiency": 0.6}}}, "transports.nvlink", "say where they come from"),
        (
            {"transports": {"nvlink": {"efficiency": 6, "kind": "assumed", "source": "paper"}}},
            "nvlink.efficiency",
            "range",
        ),
        (
            {"kernels": {"matmul": {"tiles": 3, "kind": "assumed", "source": "paper"}}},
            "kernels.matmul.tiles",
            "unknown",
        ),
        ({"kernels": 7}, "kernels", "must be a mapping"),
        ({"gpu_spec": {"sms": 10}}, "gpu_spec.peak_flops_per_s", "required"),
        ({"gpu_spec": None}, "gpu_spec", "required"),
        ({"like": "h1000"}, "like", "no profile file of this name"),
        ({"like": "b200-sxm-180gb"}, "like", "no whole profile"),
        ({"like": "./twice.yaml"}, "like", "no whole profile"),
        ({"like": 3}, "like", "must be text"),
        ({"sources": {}}, "gpu_spec", "not one of the file's sources"),
    ],
)
def test_a_wrong_short_profile_is_refused_with_its_key(tmp_path: Path, own: dict, key: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        twice(tmp_path, **own)
    assert key in str(caught.value)
    assert "twice.yaml" in str(caught.value)


def test_another_power_limit_is_all_that_a_file_need_say_of_power() -> None:
    """What kernels draw at a clock is taken over; a file that gives nothing of power has no limit on its clock."""
    base, capped = load_profile("h100-sxm-80gb").power, load_profile("h100-sxm-96gb-500w").power
    assert base is not None
    assert capped is not None
    assert (capped.limit_w, capped.loads) == (500, base.loads)
    assert load_profile("h800-sxm-80gb").power is None
    # Products alone keep to a limit P at the clock where idle + (W - idle) (f / f_W)^e is P.
    kernel = Matmul(8192, 8192, 8192, dtype="bf16", role="fwd")
    costs = Costs.from_profile(load_profile("h100-sxm-96gb-500w"))
    load = base.loads["matmul"]
    clock_hz = load.clock_hz * ((500 - base.idle_w) / (load.watts - base.idle_w)) ** (1 / load.power_exponent)
    assert costs.power is not None
    drawn_w = costs.power.drawn_w("matmul", clock_hz) + base.idle_w
    assert drawn_w == pytest.approx(500)
    assert costs.power.slowness(kernel, clock_hz) == pytest.approx(
        (load.priced_at_hz / clock_hz) ** load.speed_exponent
    )

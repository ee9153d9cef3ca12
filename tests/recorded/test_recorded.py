"""Every recorded job comes out as it was recorded."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from forms import names_of_repeated_forms
from jobs import JOBS
from record import differences, read, record

from tests.support.unadvised import without_advice  # noqa: F401


@cache
def recorded() -> dict[str, dict[str, Any]]:
    return read()


#: Jobs that take longer than a quarter of a second each.
LONG = {
    *("deepseek_v3_dualpipe", "deepseek_v3", "qwen3_235b", "llama3_405b", "llama3_405b_131k", "llama3_70b"),
    *("mixtral_8x7b", "gb200", "missing_gpu", "no_fold", "gpt3_175b_256", "palm_540b_1024", "cp_ring_contiguous"),
    *("pp8_zbv_h4096_l16_b32", "tt2_pp_zbv_llama1b", "tt2_pp_interleaved_llama1b", "tt2_pp_1f1b_llama1b"),
    *("pp2_dp2_h2560_l24_s2k", "pp2_interleaved_zb_h4096_l12_s4k", "tp2_pp2_dp2_interleaved_h4096_l16_b32"),
    *("dp_async_slow_gpu", "gpt175b_3d", "offload_activations_nvme_pp"),
    *("tp2_pp2_dp2_h4096_l16_b32", "pp2_interleaved_h5120_l8_s2k", "pp2_interleaved_h3072_l12"),
    *("pp2_gpipe_h2048_l24_s4k", "pp2_zbv_h4096_l12_s4k", "pp2_1f1b_h5120_l8_s2k", "hf1_lora_llama8b_full"),
    *("fp8_delayed_pp", "tp2_pp2_h4096_l16", "pp2_dualpipe_v_h3072_l12", "hf2_ddp_qwen17_ckpt", "pp2_dp2_h4096_l16"),
    *("host_h1024_l16_s1k_fsdp2", "pp2_dualpipe_v_h4096_l12_s4k", "tp2_dp2_h4096_l16", "pp2_interleaved_zb_h3072_l12"),
}
#: Jobs that `make test` leaves out.
SLOW = names_of_repeated_forms() | LONG


@pytest.mark.usefixtures("without_advice")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in JOBS]
)
def test_a_job_comes_out_as_recorded(name: str) -> None:
    changed = differences(recorded()[name], record(JOBS[name]))
    assert not changed, f"{len(changed)} values differ:\n" + "\n".join(changed[:40])


def test_every_job_has_a_record() -> None:
    assert recorded().keys() == JOBS.keys()
    assert not LONG - JOBS.keys()


def test_the_comparison_can_fail() -> None:
    """Numbers may differ by one part in 1e9; a text, a missing entry and an entry more are told at once."""
    before = {"step_time_s": 2.0, "lanes": {"0 compute": {"order_of_steps": "ab", "rows": 3}}, "stages": [1.0]}

    def with_lane(**values: Any) -> dict[str, Any]:
        return {**before, "lanes": {"0 compute": {**before["lanes"]["0 compute"], **values}}}

    assert differences(before, {**before, "step_time_s": 2.0 * (1 + 1e-10)}) == []
    assert differences(before, {**before, "step_time_s": 2.0 * (1 + 2e-9)}) != []
    assert differences(before, with_lane(order_of_steps="ba")) == [".lanes.0 compute.order_of_steps: was 'ab', is 'ba'"]
    assert differences(before, with_lane(rows=4)) == [".lanes.0 compute.rows: was 3, is 4"]
    assert ".stages.1: is new" in differences(before, {**before, "stages": [1.0, 2.0]})
    assert ".stages.0: is gone" in differences(before, {**before, "stages": []})
    # How many events it took is not a result.
    assert differences({"not_compared": {"events": 1}}, {"not_compared": {"events": 2}}) == []

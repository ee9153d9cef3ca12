"""Rules that people rely on, of pipelines (R01 to R12): what runs, what is refused, and what is counted."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from simulator import run, schedule
from simulator.config import load_workload, warnings
from simulator.config.workload import Workload
from simulator.errors import InputError
from simulator.models import stage_parts
from simulator.schedules import SCHEDULES
from tests.support.jobs import job


def layers(count: int, **parallelism: Any) -> Workload:
    """A tiny model of so many layers."""
    changes = {f"parallelism__{key}": value for key, value in parallelism.items()}
    return load_workload(job(model__layers=count, **changes))


def warmup(order: list[list[str]]) -> list[int]:
    """Forwards of each rank before its first backward."""
    return [next(i for i, text in enumerate(actions) if "B" in text) for actions in order]


@pytest.mark.parametrize("p", [1, 2, 4, 8])
@pytest.mark.parametrize("m", [1, 3, 8, 32])
def test_r01_warmup_of_1f1b(p: int, m: int) -> None:
    """pp - rank - 1 forwards, capped at m; the steady phase begins with one more forward, where there is one."""
    counts = warmup(schedule("1f1b", p, m).order)
    assert counts == [min(min(p - rank - 1, m) + 1, m) for rank in range(p)]


def test_r01_warmup_of_interleaved() -> None:
    """2 (pp - rank - 1) + (chunks - 1) pp: pp 4 with 2 chunks gives 10, 8, 6, 4, and one more; capped at m chunks."""
    assert warmup(schedule("interleaved", 4, 8, 2).order) == [11, 9, 7, 5]
    assert warmup(schedule("interleaved", 4, 4, 2).order) == [8, 8, 7, 5]


@pytest.mark.parametrize(("m", "runs"), [(8, True), (10, True), (3, True), (9, False), (5, True), (7, True)])
def test_r02_interleaved_runs_in_whole_rounds(m: int, runs: bool) -> None:
    """rounds = max(1, m // pp) must divide m: of pp 4, 9 makes two rounds that do not."""
    if runs:
        assert schedule("interleaved", 4, m, 2).to_dict()["bubble_ratio"] > 0
    else:
        with pytest.raises(InputError, match="nearest: 8, 10"):
            schedule("interleaved", 4, m, 2)


@pytest.mark.parametrize("name", SCHEDULES)
def test_r03_fewer_microbatches_than_stages(name: str) -> None:
    """All run, with their larger bubble, but those with a least number of micro-batches, who name it."""
    chunks = SCHEDULES[name].chunks or 2
    if name in ("dualpipe", "dualpipe_v"):
        for m in (3, 7, 9):
            with pytest.raises(InputError, match=r"even number of at least 8 micro-batches \(2 pp"):
                schedule(name, 4, m, chunks)
        return
    few, many = (schedule(name, 4, m, chunks).to_dict()["bubble_ratio"] for m in (3, 12))
    assert few > many or SCHEDULES[name].bubble(4, 3, chunks, 1, 1, 1) in (0.0, 3.0)  # none for async, p - 1 for naive


def test_r04_interleaved_on_two_ranks() -> None:
    assert run(job(parallelism__pp=2, parallelism__vpp=2, parallelism__schedule="interleaved")).spans.step_time_s > 0


def test_r05_layers_that_do_not_divide_are_refused_with_a_split() -> None:
    with pytest.raises(InputError, match=r"layers_per_stage: \[8, 8, 7, 7\]"):
        layers(30, pp=4)
    for count in (30, 31, 33):
        split = [count // 4 + (stage < count % 4) for stage in range(4)]
        assert sum(layers(count, pp=4, layers_per_stage=split).parallelism.layers_per_stage) == count


def test_r06_uneven_stages_run() -> None:
    workload = job(model__layers=7, parallelism__pp=2, parallelism__layers_per_stage=[3, 4])
    assert [row["layers"] for row in run(workload).to_dict()["stages"]["per_stage"]] == [3, 4]


def test_r07_embedding_and_loss_may_count_as_layers() -> None:
    """12 layers with 2, 4, 4, 2; 10 with embedding and loss count as 12 and give 2, 3, 3, 2."""
    assert layers(12, pp=4, layers_per_stage=[2, 4, 4, 2]).parallelism.pp == 4
    ends = {"account_for_embedding": True, "account_for_loss": True}
    assert layers(10, pp=4, **ends).parallelism.layers_per_stage == (2, 3, 3, 2)
    assert layers(11, pp=4, account_for_loss=True).parallelism.layers_per_stage == (3, 3, 3, 2)
    assert layers(2, pp=4, **ends).parallelism.layers_per_stage == (0, 1, 1, 0)
    with pytest.raises(InputError, match=r"layers_per_stage: \[3, 3, 3, 2\]"):
        layers(11, pp=4, **ends)
    with pytest.raises(InputError, match="leave account_for_embedding and account_for_loss out, or layers_per_stage"):
        layers(10, pp=4, layers_per_stage=[3, 3, 2, 2], **ends)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_h2", "zb_auto"])
def test_r07_stages_of_embedding_and_loss_alone_run(name: str) -> None:
    split = [0, 4, 4, 0]
    assert run(job(parallelism__pp=4, parallelism__schedule=name, parallelism__layers_per_stage=split)).spans.n_rows


def test_r08_sixty_one_layers_on_sixteen_stages() -> None:
    """DeepSeek-V3's split: 4, fourteen times 4, and 1 with multi-token prediction and loss on the last stage."""
    split = [4] * 15 + [1]
    changes = {"model__layers": 61, "model__mtp_layers": 1, "parallelism__pp": 16}
    workload = load_workload(job(**changes, parallelism__layers_per_stage=split))
    names = [[part.name for part in stage_parts(workload, stage)] for stage in range(16)]
    assert [stage.count("layer") for stage in names[:15]] == [4] * 15
    assert "embedding" in names[0]
    assert names[15][0] == "layer"
    assert names[15][1] == "head"
    assert any(name.startswith("mtp") for name in names[15])
    assert not any(name.startswith("mtp") for stage in names[:15] for name in stage)


def test_r09_the_split_that_balances_is_shown() -> None:
    """27 layers of hidden 4096 on pp 4. The projection to 50,257 words has h V / 12 h^2 = 50,257 / (12 x 4096) = 1.02
    times the products of a layer, so that the last stage is to have one layer less."""
    sizes = {"layers": 27, "hidden": 4096, "heads": 32, "vocab": 50257, "tied_embeddings": False}
    workload = job(parallelism__pp=4, training__seq=2048) | {"model": sizes}
    uneven = run(workload, set={"parallelism.layers_per_stage": [6, 7, 7, 7]}).to_dict()["stages"]
    even = run(workload, set={"parallelism.layers_per_stage": [7, 7, 7, 6]}).to_dict()["stages"]
    assert uneven["layers_per_stage"] == [7, 7, 7, 6]
    assert even["layers_per_stage"] is None
    assert uneven["slowest_over_mean"] > 1.1 > 1.05 > even["slowest_over_mean"]
    with pytest.raises(InputError, match=r"\[7, 7, 7, 6\]"):
        load_workload(workload)


def test_r10_gpipe_and_1f1b_idle_alike() -> None:
    """p 8, m 32, F = B: 7 / 39 of the step, 17.95 %; stage 0 holds 32 and 8."""
    for name, held in (("gpipe", 32), ("1f1b", 8)):
        result = schedule(name, 8, 32, backward=1.0).to_dict()
        assert result["bubble_fraction"] == pytest.approx(14 / 78)
        assert result["peak_activations"][0] == held
    for backward in (0.5, 2.0, 3.7):
        one, other = (schedule(name, 8, 32, backward=backward).to_dict()["bubble_ratio"] for name in ("gpipe", "1f1b"))
        assert one == pytest.approx(other) == pytest.approx(7 / 32)


def test_r11_a_larger_microbatch_has_a_larger_bubble() -> None:
    """Fewer micro-batches: 16 sequences make 16, 8, 4 and 2."""
    jobs = [run(job(parallelism__pp=4, training__micro_batch=size)).to_dict() for size in (1, 2, 4, 8)]
    assert [result["n_microbatches"] for result in jobs] == [16, 8, 4, 2]
    bubbles = [result["bubble_fraction"] for result in jobs]
    assert all(smaller < larger for smaller, larger in itertools.pairwise(bubbles))


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2", "zb_auto"])
def test_r12_zero_bubble_with_full_recompute(name: str) -> None:
    """Runs, and warns that the split backward recomputes first."""
    workload = job(parallelism__pp=2, parallelism__schedule=name, training__recompute="full")
    assert any("recomputation runs before the input gradient" in note for note in warnings(load_workload(workload)))
    assert run(workload).to_dict()["time_breakdown_s"]["recompute"] > 0


def test_a_file_of_one_rank_with_two_chunks_runs(tmp_path: Path) -> None:
    """Nothing is sent; what a model's own stages do in turn is for the file to say."""
    path = tmp_path / "one.csv"
    path.write_text("0F0,1F0,1B0,0B0,0F1,1F1,1B1,0B1\n")
    played = run(job(parallelism__schedule=str(path), parallelism__vpp=2, training__global_batch=2))
    assert [len(played.spans.ranks), played.workload.parallelism.vpp] == [1, 2]


def test_layers_per_stage_beside_an_even_split_that_counts_the_loss_names_both_keys() -> None:
    keys = {"parallelism__pp": 2, "parallelism__account_for_loss": True}
    with pytest.raises(InputError, match="leave account_for_loss out, or layers_per_stage"):
        load_workload(job(**keys, parallelism__layers_per_stage=[8, 0]))

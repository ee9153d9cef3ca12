"""What is printed of a result, and the dictionary that it is read from."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

import simulator
from simulator.analysis.training.memory import memory_of_ranks, narrow_warning
from simulator.analysis.training.report import StepFlops, TrainingJob, report
from simulator.analysis.training.static_memory import StaticMemory
from simulator.config import altered, load_workload
from simulator.models import StateBytes
from simulator.output.efficiency_text import BUBBLE_WINDOW, mfu_lines
from simulator.output.memory_summary import fit_verdict
from simulator.output.notebook_view import step_view
from simulator.output.page.sections import cards
from simulator.output.summary import compare, compared_rows, summary
from simulator.timeline import Timeline
from simulator.units import GiB
from tests.support.terminal import printed
from tests.support.timelines import pipeline, template


def play() -> Timeline:
    tail = template(("adam", "optimizer", "optimizer", 0.5), phase="O")
    return pipeline("1f1b", 2, 4, comm=0.25, tail=tail, activation=4 * GiB)


def job(*, optimizer: float = 12 * GiB, tokens: float | None = 1e6, price: float | None = 2.0) -> TrainingJob:
    """8 A100s, of whose memory 40 GiB count."""
    workload = load_workload(
        {
            "name": "tiny",
            "model": {"layers": 8, "hidden": 1024, "heads": 16, "vocab": 51_200},
            "training": {"seq": 1024, "global_batch": 16, "total_tokens": tokens},
            "parallelism": {"pp": 2, "dp": 4},
            "cluster": {"name": "dgx_a100", "price_per_gpu_hour": price},
        }
    )
    return TrainingJob(
        workload=workload,
        peak_flops_per_s=1e14,
        calibration={"name": "test", "gpu": "gpu", "date": "2026-01-01", "source": "here", "kind": "measured"},
        parameters=2e9,
        active_parameters=2e9,
        trained_parameters=2e9,
        flops=StepFlops(model=8e15, causal=7e15, hardware=10e15),
        pipelines=[(0, 1)],
        memories=memory_of_ranks(
            play(),
            dict.fromkeys((0, 1), StaticMemory(StateBytes(2 * GiB, 4 * GiB, optimizer))),
            dict.fromkeys((0, 1), 40.0 * GiB),
        ),
        advice=["parallelism.zero: 1 would free 9.0 GiB: enough"] if optimizer > 30 * GiB else [],
        better_split=lambda now: None,
        pipeline_rank=(0, 0, 0, 0, 1, 1, 1, 1),
        slower_host_step_s=lambda: 2.0,
    )


def test_report_figures_follow_from_step_time() -> None:
    result = report(job(), play())
    # 16 sequences of 1,024 tokens a step; a million tokens are 61.03 steps.
    step = result["step_time_s"]
    assert result["tokens_per_s"] == pytest.approx(16 * 1024 / step)
    assert result["tokens_per_s_per_gpu"] == pytest.approx(2 * 1024 / step)
    assert result["mfu"] == pytest.approx(8e15 / (8 * 1e14 * step))
    assert result["hfu"] / result["mfu"] == pytest.approx(10 / 8)
    assert result["run"]["gpu_hours"] == pytest.approx(1e6 / 16384 * step * 8 / 3600)
    assert result["run"]["cost"] == pytest.approx(2 * result["run"]["gpu_hours"])
    assert result["run"]["days"] == pytest.approx(result["run"]["gpu_hours"] / 8 / 24)
    assert f"cost {result['run']['cost']:,.0f} at 2 a GPU-hour" in printed(summary(result))
    assert sum(row["seconds"] for row in result["critical_path"]) == pytest.approx(step)
    assert result["simulation"]["ops"] == play().n_rows
    assert "run" not in report(job(tokens=None), play())
    assert report(job(price=None), play())["run"]["cost"] is None


def judged(*_: Any) -> dict[str, Any]:
    """An interval from 15.2 to 18 s of a step of 16.5 s, which rests on six sources."""
    sources = [{"source": f"source {n}", "n_rows": 2, "likeness": 1.0, "error": -0.05} for n in range(6)]
    accuracy = {"interval_s": [15.2, 18.0], "level": 0.9, "bias": -0.04, "n_rows": 12, "rows": [], "sources": sources}
    accuracy |= {"all_sources": {"n_sources": 9, "error": 0.02}}
    accuracy |= {"alike": ["framework pytorch"], "unlike": ["GPUs 64: measured with 1 to 4"]}
    return {"accuracy": accuracy, "nothing_comparable": []}


def incomparable(*_: Any) -> dict[str, Any]:
    return {"accuracy": None, "nothing_comparable": ["kind of GPU Ada: measured with others"]}


def test_the_interval_stands_beside_the_step_time_and_what_it_rests_on_at_the_end() -> None:
    text = printed(summary(report(job(), play(), accuracy=judged)))
    (line,) = (line for line in text.splitlines() if line.startswith("step time"))
    assert line.rstrip().endswith("s (15.20 to 18.00 s: as far off as 12 comparable steps of 6 sources were)")
    order = [line, "source 0: 2 steps, simulated 5.0 % too fast", "source 3", "2 sources less alike: 4 steps",
             "all 9 sources, which count as one more: simulated 2.0 % too slow",
             "simulated 4.0 % too fast", "GPUs 64: measured with 1 to 4"]  # fmt: skip
    assert sorted(order, key=text.index) == order
    assert "source 4:" not in text


def view_of(result: dict[str, Any]) -> str:
    """Return what a notebook shows of a report without warnings."""
    return step_view({**result, "warnings": []})


def outside(*_: Any) -> dict[str, Any]:
    """An interval beyond the step of 16.5 s, from one source."""
    one = judged()
    one["accuracy"] |= {"interval_s": [17.5, 36.0], "bias": -0.34, "n_rows": 6}
    one["accuracy"]["sources"] = one["accuracy"]["sources"][:1]
    return one


def test_a_step_outside_of_its_interval_says_how_far_off_it_likely_is_and_on_what_little_evidence() -> None:
    """The terminal says so, two jobs side by side, and the cards of pages and notebooks."""
    result = report(job(), play(), accuracy=outside)
    text = " ".join(printed(summary(result)).split())
    assert (
        "(by 6 comparable steps of 1 source, thin evidence, likely 34.0 % too fast, so expect 17.50 to 36.00 s)" in text
    )
    (row,) = (row for row in compared_rows(result, report(job(), play(), accuracy=judged)) if "interval" in row[0])
    assert row[1:3] == ("17.50 to 36.00 s (step likely 34.0 % too fast)", "15.20 to 18.00 s")
    assert "likely 34.0 % too fast, so expect 17.50 to 36.00 s, thin evidence: 1 source" in view_of(result)
    assert "thin evidence" not in view_of(report(job(), play(), accuracy=judged))


def test_mfu_says_of_which_peak_it_is_and_how_much_of_attention_it_counts() -> None:
    """8 PFLOP of 8 GPUs of 0.1 PFLOP/s in 16.5 s are 60.6 %; with half of attention 7 of them count.

    Of an fp8 peak twice as high MFU is half as large."""
    both = report(replace(job(), fp8_peak_flops_per_s=2e14), play())
    for text in (printed(summary(both)), view_of(both)):
        assert "of the dense bf16 peak of 100.0 TFLOP/s; counts the whole square of attention" in text
        assert "53.0 % counting half of it; 30.3 % of the dense fp8 peak of 200.0 TFLOP/s" in text
    plain = replace(job(), flops=StepFlops(model=8e15, causal=8e15, hardware=8e15))
    assert "square" not in printed(summary(report(plain, play())))


@pytest.mark.parametrize(
    ("left", "verdict"), [(0.001, "barely fits"), (0.029, "barely fits"), (0.031, "fits"), (-0.001, "does not fit")]
)
def test_a_job_that_leaves_less_than_memory_is_off_by_barely_fits(left: float, verdict: str) -> None:
    """The fullest GPU needs its capacity but for a share; what fits barely is warned of, so that --strict sees it."""
    whole = job()
    needed = max(memory.total for memory in whole.memories)
    memories = [replace(memory, capacity=needed / (1 - left)) for memory in whole.memories]
    result = report(replace(whole, memories=memories), play())
    assert result["memory"]["fits"] == (left >= 0)
    assert fit_verdict(result["memory"]) == verdict
    assert f"{verdict}: at most" in printed(summary(result)).lower() or left < 0
    assert f"<b>{verdict}</b>" in view_of(result)
    assert bool(narrow_warning(memories)) == (verdict == "barely fits")


def test_memory_of_unequal_gpus_is_that_of_the_one_with_the_least_left() -> None:
    """Stage 0 is fuller, and the GPU of stage 1 is so small that it lacks 1 GiB: all figures are those of stage 1."""
    whole = job()
    first, second = whole.memories
    assert first.total > second.total
    memories = [replace(first, capacity=2 * first.total), replace(second, capacity=second.total - GiB)]
    result = report(replace(whole, memories=memories), play())
    needed, has = f"{second.total / GiB:.1f} GiB", f"{second.total / GiB - 1:.1f} GiB"
    text = printed(summary(result))
    assert f"a GPU needs {needed} and has {has}." in text
    assert f"DOES NOT FIT: {needed} of {has}" in text
    assert "Stage 1 is fullest" in text
    assert f"at most {needed} of {has}" in view_of(result)


def test_where_nothing_is_comparable_the_text_says_so_first() -> None:
    text = printed(summary(report(job(), play(), accuracy=incomparable))).lstrip()
    assert text.startswith("NO MEASURED STEP IS COMPARABLE")
    assert text.splitlines()[1].strip() == "kind of GPU Ada: measured with others"
    assert "(nothing comparable was measured)" in text
    small = printed(summary(report(job(optimizer=32 * GiB), play(), accuracy=incomparable)))
    assert small.index("DOES NOT FIT") < small.index("NO MEASURED STEP")


def test_two_jobs_side_by_side_have_their_intervals() -> None:
    one, two = (report(job(), play(), accuracy=said) for said in (judged, incomparable))
    (line,) = (line for line in printed(compare(one, two)).splitlines() if "90 % interval" in line)
    assert "15.20 to 18.00 s" in line
    assert "nothing comparable" in line


def test_report_is_plain_json_in_a_fixed_order() -> None:
    first, second = (json.dumps(report(job(), play()), allow_nan=False) for _ in range(2))
    assert first == second
    keys = list(json.loads(first))
    assert keys[:4] == ["name", "cluster", "cluster_changes", "calibration"]
    assert keys[-1] == "simulation"
    expected = {"step_time_s", "mfu", "hfu", "bubble_fraction", "bubble_ratio", "time_breakdown_s", "communication",
                "links", "memory", "host_bound_fraction", "critical_path"}  # fmt: skip
    assert expected <= set(keys)


def test_summary_shows_every_figure_with_its_unit_in_100_columns() -> None:
    result = json.loads(json.dumps(report(job(), play())))
    text = printed(summary(result))
    assert max(len(line) for line in text.splitlines()) <= 100
    for phrase in ("tiny on 8 GPUs of dgx_a100", "pp 2 x dp 4, 1f1b", "measured figures, 2026-01-01", "TFLOP/s", "MFU",
                   "dense bf16 peak", "tokens/s", "GPU-hours", "bubble", "Fits: at most 26.5 GiB of 40.0 GiB",
                   "exposed pp", "critical path", "without padding of the vocabulary",
                   "Stage 0 is fullest at 1.00 s, in the forward pass"):  # fmt: skip
        assert phrase in text, phrase


def test_summary_says_what_does_not_fit_and_what_would() -> None:
    text = printed(summary(report(job(optimizer=32 * GiB), play())))
    assert text.lstrip().splitlines()[0].startswith("DOES NOT FIT into memory: a GPU needs 46.5 GiB and has 40.0 GiB.")
    assert "DOES NOT FIT: 46.5 GiB of 40.0 GiB" in text
    (heads,) = (line.split() for line in text.splitlines() if "gradients" in line and "peak" in line)
    (cells,) = (line.split() for line in text.splitlines() if line.split()[:1] == ["0"] and "46.5" in line)
    assert dict(zip(heads, cells, strict=True))["over"] == "6.5"
    assert "parallelism.zero: 1 would free 9.0 GiB: enough" in text


def test_a_host_that_is_too_small_is_told_first() -> None:
    result = json.loads(json.dumps(report(job(), play())))
    assert "DOES NOT FIT" not in printed(summary(result))
    host = {"capacity_bytes": 1.0 * GiB, "fits": False, "peak_bytes": 2.0 * GiB, "nvme_bytes": 0.0}
    result["memory"] |= {"fits": False, "host": host}
    assert printed(summary(result)).lstrip().startswith("DOES NOT FIT into memory: a host needs 2.0 GiB.")


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({}, "2.00 B parameters, pp 2"),
        ({"freeze": ["norms"]}, "2.00 B parameters, 300 M trained, pp 2"),
        ({"adapters": {"rank": 16, "targets": ["q"]}}, "300 M trained (LoRA rank 16), pp 2"),
        ({"adapters": {"rank": 16, "targets": ["q"]}, "base": "nf4"}, "300 M trained (LoRA rank 16, nf4 base), pp 2"),
    ],
)
def test_the_header_says_what_is_trained(training: dict[str, Any], words: str) -> None:
    whole = job()
    changes = {f"training.{key}": value for key, value in training.items()}
    tuned = replace(whole, workload=altered(whole.workload, changes), trained_parameters=3e8 if training else 2e9)
    assert words in printed(summary(report(tuned, play())))


def test_compare_puts_two_results_side_by_side() -> None:
    slow = pipeline("1f1b", 2, 4, f=2.0, b=4.0, comm=0.5, activation=4 * GiB)
    text = printed(compare(report(job(), play()), report(job(optimizer=32 * GiB), slow)))
    assert "tiny (2)" in text
    assert "does not fit" in text
    ratio = slow.step_time_s / play().step_time_s
    assert f"{ratio:.3f}" in next(line for line in text.splitlines() if "step time" in line)


def test_jobs_without_stages_have_no_bubble_side_by_side() -> None:
    """A lone rank has no bubble beside a pipeline, whatever it waits for. Two such jobs have no row of it."""
    whole = job()
    alone = report(replace(whole, workload=altered(whole.workload, {"parallelism.pp": 1})), play())
    pipelined = report(whole, play())
    assert pipelined["parallelism"]["pp"] > 1
    rows = {label: values for label, *values in compared_rows(pipelined, alone)}
    assert rows["bubble"][1] == "0.0 %" != rows["bubble"][0]
    assert "bubble" not in {label for label, *_ in compared_rows(alone, alone)}


def test_the_two_bubbles_have_two_names() -> None:
    """The pipeline's holds exposed pp and dp communication; the breakdown shows these by themselves.

    The page of results says of which time it is a share, in the same words.
    """
    text = " ".join(printed(summary(report(job(), play()))).split())
    assert f" {BUBBLE_WINDOW}, idle / busy " in text
    assert "; pp and dp count as idle" in text
    assert BUBBLE_WINDOW in {card.beside for card in cards(report(job(), play()))}
    assert "waiting for other ranks" in text
    assert text.count("bubble") == 1


def test_the_summary_says_what_of_the_shipped_machine_was_changed() -> None:
    """One key is named in the second line; the machine as shipped, and more nodes of it, get no such line."""
    small = {"model.layers": 2, "training.global_batch": 8}
    changed = {"cluster.node.nics.bandwidth_bps": "800Gbps"}
    for change, line in ((changed, "dgx_a100, changed: node.nics.bandwidth_bps"), ({"cluster.nodes": 2}, "")):
        result = simulator.run("llama2_7b_zero2", set={**small, **change})
        assert result.report["cluster_changes"] == ([line.split()[-1]] if line else [])
        assert printed(summary(result.report)).splitlines()[1].startswith(line or "667 M parameters")


def test_the_sentence_on_the_fullest_moment_has_the_tables_names() -> None:
    """Each column that the sentence names has the table's figure there, and its contents add up to no more."""
    result = simulator.run("llama2_7b_zero2", set={"model.layers": 2, "training.global_batch": 8})
    (stage,) = result.report["memory"]["per_stage"]
    text = " ".join(printed(summary(result.report)).split())
    sentence = text[text.index("Stage 0 is fullest") : text.index("It holds at most")]
    for part in ("activations", "buffers"):
        figure, inside = re.findall(rf"{part} ([\d.]+) \(([^)]*)\)", sentence)[0]
        assert figure == f"{stage[part] / GiB:.1f}"
        named = [float(one.split()[-1]) for one in inside.split(", ")]
        assert sum(named) <= float(figure) + 0.05 * (1 + len(named))


def test_weights_that_are_the_optimizers_are_said_to_be() -> None:
    """Torch's FSDP with master weights has such weights, and so has torch.autocast.

    Parameters on the host or its drives are not here."""
    result = json.loads(json.dumps(report(job(), play())))
    assert "Weights (-) are" not in printed(summary(result))
    for stage in result["memory"]["per_stage"]:
        stage["weights"] = 0.0
    text = printed(summary(result))
    assert "Weights (-) are those in fp32 that the optimizer updates" in text
    heads = next(line for line in text.splitlines() if "weights" in line and "stage" in line).split()
    rows = [line.split() for line in text.splitlines() if re.match(r"\s+\d+\s+[\d.]+\s+-", line)]
    assert {row[heads.index("weights")] for row in rows} == {"-"}
    for place, words in (("cpu", "on the host;"), ("nvme", "on the host's drives;")):
        result["parallelism"]["offload"]["parameters"] = place
        assert f"Weights (-) are {words}" in printed(summary(result))


def test_a_narrow_terminal_still_shows_how_full_each_stage_is() -> None:
    text = printed(summary(report(job(optimizer=32 * GiB), play())), width=40)
    (heads,) = (line.split() for line in text.splitlines() if "weights" in line and "stage" in line)
    assert heads[:2] == ["stage", "peak"]
    assert "buffers" not in heads


def test_a_schedule_from_a_file_is_named_without_its_folder() -> None:
    result = json.loads(json.dumps(report(job(), play())))
    result["parallelism"]["schedule"] = "/home/me/runs/mine.csv"
    assert "pp 2 x dp 4, mine.csv," in printed(summary(result))


def test_a_stage_that_fits_beside_one_that_does_not() -> None:
    """Its cell under "over" is empty, and all other cells stand where they belong."""
    result = json.loads(json.dumps(report(job(optimizer=32 * GiB), play())))
    first, second = result["memory"]["per_stage"]
    second["capacity"] = 10 * first["capacity"]
    text = printed(summary(result)).split("Memory of the fullest GPU")[1]
    rows = [line.split() for line in text.splitlines() if line.split()[:1] in (["0"], ["1"])]
    assert [len(row) for row in rows] == [8, 7]


def test_ratios_are_told_of_all_that_does_not_read_as_zero() -> None:
    lines = printed(compare(report(job(), play()), report(job(), play()))).splitlines()
    with_ratio = {line[:24].strip() for line in lines if line.rstrip().endswith("1.000")}
    assert {"step time", "MFU", "peak memory", "bubble", "optimizer", "exposed communication"} <= with_ratio
    assert not {"recompute", "waiting for the host"} & with_ratio  # zero in both


@pytest.mark.parametrize("width", [60, 80, 100])
def test_two_workloads_side_by_side_fit_the_terminal(width: int) -> None:
    console = Console(width=width, file=io.StringIO())
    console.print(compare(report(job(), play()), report(job(), play())))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text


def test_a_share_of_the_bf16_peak_above_one_is_explained_by_narrower_products() -> None:
    """102.5 % of a peak of 2.5 PFLOP/s are a quarter of 10 PFLOP/s."""
    shares = {"mfu": 1.025, "mfu_causal": 1.025, "peak_precision": "bf16", "peak_flops_per_s_per_gpu": 2.5e15}
    lines = mfu_lines({**shares, "fp8_peak_flops_per_s_per_gpu": None, "fp4_peak_flops_per_s_per_gpu": 1e16})
    assert lines[0] == "of the dense bf16 peak of 2500.0 TFLOP/s, which products in fewer bits pass"
    assert lines[1] == "25.6 % of the dense fp4 peak of 10000.0 TFLOP/s"


@pytest.mark.parametrize(("more", "told"), [(-1.0, False), (1.0, True)])
def test_a_second_step_is_told_of_where_it_takes_more_than_the_peak_above(more: float, told: bool) -> None:
    report = dict(simulator.run("gpt22b_tp8").to_dict())
    memory = report["memory"]
    report["memory"] = memory | {"second_step_bytes": memory["peak_bytes"] + more * GiB}
    assert ("may take" in printed(summary(report), width=200)) == told

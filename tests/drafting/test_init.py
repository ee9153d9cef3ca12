"""``init``: answers by option, by question or as usual, and a file that runs."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import simulator
from simulator.cli.app import main
from simulator.cli.init import _doubts
from simulator.config import load_workload
from simulator.drafting import layouts
from simulator.drafting.entry import Draft, JobAnswers, _counted_ends
from simulator.drafting.job_file import job_text
from simulator.drafting.layouts import SPARE, ProposedLayout
from simulator.drafting.machines import JobMachines
from simulator.frameworks import FRAMEWORKS
from simulator.sweeping import evaluation
from tests.support.grids import one_in
from tests.support.machine_dumps import H100, RTX4090, card, query
from tests.support.sweeps import SMALLEST

#: A Llama of two layers, wide enough that bounds leave little to simulate.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
USUAL = ("--yes", "--jobs", "1")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def init(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["init", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def result(*arguments: object) -> dict[str, Any]:
    assert init(*arguments, *USUAL, "--quiet", "--json", "init.json") == 0
    written: dict[str, Any] = json.loads(Path("init.json").read_text())
    return written


def test_options_make_a_file_that_runs_and_fits(folder: Path) -> None:
    """The figures of the file's own run are those that the layout was chosen by."""
    summary = result("--model", "config.json", "--cluster", "dgx_h100", "--gpus", 16, "--batch", 16)
    step = simulator.run("job.yaml")
    assert step.workload.n_ranks == 16
    assert step.workload.cluster.n_nodes == 2
    assert step.report["memory"]["fits"]
    assert step.report["step_time_s"] == pytest.approx(summary["figures"]["step_time_s"])
    assert summary["n_simulated"] <= summary["n_legal"]


def test_paths_start_in_the_folder_of_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file lies in jobs/, the model and the cluster beside that; the job is the same from wherever it is run."""
    (folder / "jobs").mkdir()
    (folder / "mine.yaml").write_text("like: one_gpu\nname: mine\nnodes: 1\n")
    assert init("--model", "config.json", "--cluster", "mine.yaml", "--out", "jobs/job.yaml", *USUAL) == 0
    monkeypatch.chdir(folder / "jobs")
    job = load_workload("job.yaml")
    assert (job.model.hidden, job.cluster.name) == (4096, "mine")
    text = Path("job.yaml").read_text()
    assert '"../config.json"' in text
    assert '"../mine.yaml"' in text


@pytest.mark.parametrize(
    ("figures", "shown"),
    [
        ({"step_time_s": 1.0, "step_time_low_s": 0.9, "step_time_high_s": 1.2}, "1.00 s (900.00 ms to 1.20 s)"),
        ({"step_time_s": 1.0}, "1.00 s"),
    ],
)
def test_the_file_says_how_far_to_trust_the_step_time(figures: dict[str, float], shown: str) -> None:
    memory = {"peak_bytes": 1.0, "capacity_bytes": 2.0, "headroom_bytes": 1.0}
    layout = ProposedLayout({}, {**figures, **memory}, n_legal=1, n_simulated=1, in_time=True)
    text = job_text({}, layout, "x")
    assert f"{shown}, " in text
    assert ("nine times in ten" in text) == ("(" in shown)
    assert ("No measured step is comparable" in text) == ("(" not in shown)


def test_every_key_has_its_comment(folder: Path) -> None:
    assert init("--model", "config.json", "--cluster", "one_gpu", *USUAL) == 0
    lines = [line for line in (folder / "job.yaml").read_text().splitlines() if not line.startswith("#")]
    bare = [line.split(":")[0] for line in lines if "#" not in line]
    assert bare == ["name", "model", "training", "parallelism"]


def test_the_comment_on_zero_is_of_the_written_value_alone(folder: Path) -> None:
    """Trainer has 0 and 3, so that a comment on 1 and 2 would name what it refuses."""
    figures = {"step_time_s": 1.0, "peak_bytes": 1.0, "capacity_bytes": 2.0, "headroom_bytes": 1.0}
    layout = ProposedLayout({}, figures, n_legal=1, n_simulated=1, in_time=True)
    line = next(one for one in job_text({"parallelism": {"zero": 3}}, layout, "x").splitlines() if "zero" in one)
    assert line.endswith("# weights, gradients and optimizer states are split over replicas")


def test_adapters_stand_beside_products_that_the_model_has(folder: Path) -> None:
    """GPT-2 has no gate. On one GPU nothing is sharded, and 1k of tokens are 1,024."""
    options = ("--model", "gpt2-124m", "--cluster", "4090", "--gpus", 1, "--training", "lora", "--seq", "1k")
    workload = result(*options)["workload"]
    assert workload["training"]["adapters"]["targets"] == ["q", "k", "v", "o", "up", "down"]
    assert workload["training"]["seq"] == 1024
    assert workload["parallelism"].get("zero", 0) == 0


@pytest.mark.parametrize(
    ("options", "keys"),
    one_in(
        2,
        [
            (["--training", "qlora"], {"adapters.rank": 16, "base": "nf4"}),
            (["--training", "lora"], {"adapters.rank": 16, "base": None}),
            (["--training", "fp8"], {"fp8.recipe": "te_current", "adapters": None}),
            (["--training", "fp8", "--framework", "torchtitan"], {"fp8.recipe": "torchao_tensorwise"}),
            (["--training", "fp8", "--framework", "pytorch"], {"fp8.recipe": "torchao_tensorwise"}),
            (["--framework", "hugging_face_deepspeed"], {"fp8": None, "adapters": None}),
        ],
    ),
)
def test_ways_to_train(options: list[str], keys: dict[str, object], folder: Path) -> None:
    result("--model", "config.json", "--cluster", "h100 sxm 80gb", "--gpus", 2, "--seq", 1024, *options)
    training = load_workload("job.yaml").training
    for key, value in keys.items():
        actual: Any = training
        for part in key.split("."):
            actual = getattr(actual, part)
        assert actual == value


def test_questions_are_answered_on_standard_input(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty line takes the usual answer. Two GPUs of a type are those of the workstation that has two."""
    monkeypatch.setattr("sys.stdin", io.StringIO("config.json\n4090\n2\n\n\n512\n\n"))
    assert init("--jobs", 1) == 0
    workload = load_workload("job.yaml")
    assert (workload.cluster.name, workload.framework.name, workload.n_ranks) == ("workstation_2gpu", "hugging_face", 2)
    assert (workload.training.seq, workload.training.global_batch) == (512, 16)
    out, err = capsys.readouterr()
    assert err.count("[") == 7
    assert "next:    llmsim run job.yaml" in out


def test_machines_are_read_from_outputs_of_commands(folder: Path) -> None:
    """Eight H100 with one card of 100 Gb/s, on two nodes: as a shipped machine, but for its cards."""
    (folder / "smi.txt").write_text(query(*[H100] * 8))
    (folder / "ibstat.txt").write_text(card("mlx5_0", rate=100))
    result(
        "--model",
        "config.json",
        "--cluster",
        "smi.txt",
        "--cluster",
        "ibstat.txt",
        "--gpus",
        16,
        "--training",
        "lora",
        "--out",
        "a.yaml",
    )
    cluster = load_workload("a.yaml").cluster
    assert (cluster.n_nodes, cluster.n_gpus) == (2, 16)
    assert cluster.node_at(0).nics.bandwidth_bps == 100e9
    assert "like: dgx_h100" in (folder / "a-cluster.yaml").read_text()


def test_every_framework_has_habits_that_its_limits_allow() -> None:
    """No layout that is proposed to search over has a value of which none is simulated."""
    for name, framework in FRAMEWORKS.items():
        habits = framework.habits
        for limit in framework.limits:
            values: dict[str, object] = {
                "parallelism.zero": habits.zero,
                "parallelism.tp": (1,) if habits.one_rank_layers else (1, 2),
                "parallelism.pp": (1,) if habits.one_stage else (1, 2),
            }
            if limit.key in values and not limit.where:
                tried = values[limit.key]
                assert isinstance(tried, tuple)
                assert {*tried} <= {*limit.allowed}, (name, limit.key)


@pytest.mark.parametrize("framework", ["megatron_core", "megatron_core_local"])
def test_ends_count_as_layers_where_stages_divide_only_so(framework: str) -> None:
    """126 layers, of either implementation of Megatron-Core's."""
    data = {"name": "x", "model": {"preset": "llama3-405b"}, "framework": framework, "parallelism": {}}
    data |= {"training": {"seq": 512, "global_batch": 8}, "cluster": {"name": "dgx_h100"}}
    assert not FRAMEWORKS[framework].habits.one_stage
    assert _counted_ends(data) == {"account_for_embedding": True, "account_for_loss": True}


def test_a_gpu_without_bf16_trains_in_fp16(folder: Path) -> None:
    result("--model", "config.json", "--cluster", "colab_t4")
    assert load_workload("job.yaml").training.precision == "fp16"


def test_memory_is_left_where_a_layout_leaves_some(folder: Path) -> None:
    """A model of 0.6 billion parameters on 24 GiB: the fastest layout fills the GPU, and the next ones do not."""
    (folder / "smi.txt").write_text(query(RTX4090))
    summary = result("--model", "qwen3-0.6b", "--cluster", "smi.txt", "--seq", 2048, "--batch", 4)
    figures = summary["figures"]
    assert figures["headroom_bytes"] >= SPARE * figures["capacity_bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "lama3-8b"], "--model: is no shipped model"),
        (["--model", "nobody/nothing"], "--model: is no shipped model"),
        (["--cluster", "h100"], "--cluster: may be several types of GPU"),
        (["--cluster", "abacus"], "--cluster: is no cluster and no type of GPU"),
        (["--cluster", "a100-pcie-40gb"], "--cluster: is no cluster and no type of GPU"),
        (["--cluster", "h800-sxm-80gb"], "--cluster: is in no shipped cluster"),
        (["--gpus", "0"], "--gpus: must be a whole number"),
        (["--gpus", "-3"], "--gpus: must be a whole number"),
        (["--gpus", "1000001"], "--gpus: must be a whole number"),
        (["--gpus", "3", "--cluster", "one_gpu"], "--gpus: are more than the 1 GPU of one_gpu"),
        (["--model", "captured.json"], "--model: is a captured model"),
        (["--seq", "1000000000"], "--seq: makes tensors"),
        (["--seq", "100", "--training", "fp8"], "--seq: te_current sums over"),
        (["--training", "fp8", "--cluster", "colab_t4"], "--training: operands in 8 bits"),
        (["--batch", "7", "--gpus", "2", "--framework", "hugging_face"], "--batch: does not divide"),
        (["--training", "half"], "--training: is none of these"),
        (["--training", "fp8", "--framework", "hugging_face"], "is none of these"),
        (["--framework", "megatron"], "fix:     megatron_core"),
        (["--seq", "0"], "--seq: must be a whole number"),
        (["--budget-s", "0"], "--budget-s: must be a number of seconds"),
        (["--out", "job.txt"], "--out: no file of this kind"),
        (["--out", "there.yaml"], "there.yaml: is there already"),
        (["--model", "llama2-70b", "--gpus", "1", "--cluster", "one_gpu"], "fits, of"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "there.yaml").write_text("name: mine")
    (folder / "captured.json").write_text('{"format": 1, "widest_split": 1}')
    default = [] if "--model" in arguments else ["--model", "config.json"]
    assert init(*default, *arguments, *USUAL) == 2
    assert message in capsys.readouterr().err
    assert (folder / "there.yaml").read_text() == "name: mine"
    assert not (folder / "job.yaml").exists()


def test_an_input_at_its_end_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert init() == 2
    assert "--model: is not answered" in capsys.readouterr().err


def test_gpus_that_stay_idle_and_a_search_cut_short_are_told(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 GPUs of nodes of 8 are two nodes, of which 4 stay idle; a clock that jumps ends the search at once."""
    hours = itertools.count(0.0, 3600.0)
    with monkeypatch.context() as patch:
        patch.setattr("time.monotonic", lambda: next(hours))
        assert init("--model", "config.json", "--cluster", "dgx_h100", "--gpus", 12, "--budget-s", 60, *USUAL) == 2
    assert "none of 0 layouts was found to fit in time" in capsys.readouterr().err
    layout = ProposedLayout({}, {"headroom_bytes": 1.0, "capacity_bytes": 200.0}, 9, 3, in_time=False)
    answers = JobAnswers("m", JobMachines({"name": "dgx_h100"}), 12, "full", "pytorch", 1, 1)
    assert list(_doubts(Draft({"model": {}}, "", layout, idle_gpus=4, without_encoder=""), answers, 2.5)) == [
        "Only 0.5% of memory is left, and figures of memory are 6 % off in the mean.",
        "4 GPUs of the 16 in whole nodes stay idle; --gpus 16 uses all of them",
        "the search ended after --budget-s 2.5: layouts that were not simulated may be faster",
    ]


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("full", "fewer tokens per sequence, training lora or qlora, or parallelism.offload"),
        ("lora", "fewer tokens per sequence, training qlora, or parallelism.offload"),
        ("qlora", "more GPUs, fewer tokens per sequence, or parallelism.offload"),
    ],
)
def test_a_job_that_does_not_fit_is_told_methods_that_take_less(
    method: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """405 billion parameters in half a byte are 200 GB; an H100 has 80."""
    assert init("--model", "llama3-405b", "--cluster", "h100-sxm-80gb", "--gpus", 1, "--training", method, *USUAL) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("cut_short", [False, True])
def test_a_second_search_simulates_nothing_again(monkeypatch: pytest.MonkeyPatch, cut_short: bool) -> None:
    """No layout leaves enough, so that a longer ranking is asked for; ended at once, it takes nothing away."""
    simulated: list[Any] = []
    run_step, search = evaluation.run_step, layouts.search
    budgets: list[float] = []

    def hurried(data: Any, *, budget_s: float, **options: Any) -> Any:
        budgets.append(0.0 if cut_short and budgets else budget_s)
        return search(data, **{**options, "budget_s": budgets[-1]})

    monkeypatch.setattr(evaluation, "run_step", lambda workload: [simulated.append(workload), run_step(workload)][1])
    monkeypatch.setattr(layouts, "search", hurried)
    monkeypatch.setattr(layouts, "_leaves_enough", lambda one: False)
    data = {**SMALLEST, "training": {**SMALLEST["training"], "global_batch": 8}, "framework": "pytorch"}
    proposed = layouts.proposed_layout(data, 2, 1e6, 1, None)
    assert len(budgets) == 2
    assert proposed.n_simulated == len(simulated) > 3
    assert proposed.in_time
    best = simulator.search(
        data, gpus=2, fix={"zero": [0, 3], "tp": [1], "cp": [1]}, limit={"micro_batch": (1, 8)}, jobs=1
    ).best
    assert best is not None
    assert proposed.figures["step_time_s"] == pytest.approx(best.step_time_s)


def test_names_that_nvidia_smi_prints_are_types_of_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("config.json\nNVIDIA GeForce RTX 4090\n1\n\n\n256\n\n"))
    assert init("--jobs", 1) == 0
    assert load_workload("job.yaml").gpu_types == ("rtx-4090-24gb",)


@pytest.mark.parametrize(
    ("method", "reason"),
    [("full", "its file leaves open how large images are"), ("lora", "adapters stand in text models alone")],
)
def test_a_model_of_images_is_drafted_as_its_text_model(
    method: str, reason: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Images of Qwen2.5-VL have any size, so that its config.json does not say how many patches they have; adapters are
    not simulated beside an encoder at all. The file and a warning say what is left out, and that reason alone."""
    vision = {"depth": 2, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14}
    vision |= {"spatial_merge_size": 2, "out_hidden_size": 4096, "fullatt_block_indexes": [1], "window_size": 112}
    vision |= {"hidden_act": "silu", "in_chans": 3, "temporal_patch_size": 2}
    images = {**CONFIG, "model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    images |= {"hidden_act": "silu", "vision_config": vision}
    (folder / "images.json").write_text(json.dumps(images))
    assert init("--model", "images.json", *USUAL, "--training", method) == 0
    [told] = [line for line in capsys.readouterr().err.splitlines() if "without its encoder of images" in line]
    assert reason in told
    assert ("adapters" in told) == (method == "lora")
    assert load_workload("job.yaml").model.encoder is None
    assert "encoder: null" in (folder / "job.yaml").read_text()

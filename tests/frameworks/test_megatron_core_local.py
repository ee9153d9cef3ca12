"""Megatron-Core's local modules: their kernels counted by hand from its source, what they keep, and a real trace."""

from __future__ import annotations

import csv
import gzip
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from simulator import models
from simulator.config import Workload, load_workload
from simulator.costs import Costs
from simulator.errors import InputError
from simulator.models import optimizer_ops
from simulator.operations.nodes import Op
from simulator.program import Compute, Matmul, Memory
from tests.support.measured import profile

RECORDS = Path(__file__).resolve().parents[2] / "calibration" / "results" / "frameworks"
RUNS = RECORDS.parents[1] / "runs" / "frameworks"
LAYERS, HIDDEN, HEADS, VOCAB, BATCH, SEQ = 2, 256, 4, 1024, 2, 128
SCORES = BATCH * HEADS * SEQ * SEQ
GPT: dict[str, Any] = {"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "vocab": VOCAB}
LLAMA: dict[str, Any] = {
    **GPT,
    **{"kv_heads": 2, "ffn_hidden": 512, "activation": "swiglu", "norm": "rmsnorm", "position": "rope", "bias": False},
}


def load(model: dict[str, Any], **sections: Any) -> Workload:
    training = {"seq": SEQ, "micro_batch": BATCH, "global_batch": BATCH} | sections.pop("training", {})
    job = {"model": model, "training": training, "framework": "megatron_core_local", "cluster": "hgx_h200_8gpu"}
    return load_workload({"name": "small", **job, "parallelism": {"dp": 1}, **sections})


def kinds(ops: Iterable[Op]) -> Counter[str]:
    """Kernels by class: products, and those that memory bounds together."""
    return Counter("product" if isinstance(op.kernel, Matmul) else "memory" for op in ops if isinstance(op, Compute))


def around_scores(ops: Iterable[Op]) -> list[tuple[str, float]]:
    """Class and bytes of an element of the kernels that work on a number for each score."""
    return [(kernel.op, kernel.bytes / SCORES) for kernel in kernels_on_scores(ops)]


def kernels_on_scores(ops: Iterable[Op]) -> list[Memory]:
    names = [f"attn.{step}{suffix}" for step in ("upcast", "mask", "softmax", "cast") for suffix in ("", " bwd")]
    return [op.kernel for op in ops if isinstance(op, Compute) and isinstance(op.kernel, Memory) and op.name in names]


# --- kernels of a layer ---


def test_kernels_of_a_gpt_layer() -> None:
    """Six products: q k v together, scores, context, the projection, and two of the MLP.

    Forward there are two norms, and the bias of q, k and v. The softmax has four: to fp32, mask, softmax, to bf16. One
    copies the context to rows of tokens, one is GELU, and two are sums: 2 + 1 + 4 + 1 + 1 + 2 = 11.

    Backward there is each product twice. A norm has one for its input, one for its parameters, and one that adds their
    gradients to the buffer. With the sum round the block that is 2 x 4. The softmax has four, the join of q, k and v
    one, GELU one. Each of four linear layers adds its weight's gradient, sums up its bias's, and adds that: 4 x 3.
    8 + 4 + 1 + 1 + 12 = 26.
    """
    part = models.layer(load(GPT))
    assert kinds(part.forward) == {"product": 6, "memory": 11}
    assert kinds(part.backward) == {"product": 12, "memory": 26}


def test_kernels_of_a_llama_layer() -> None:
    """A layer of Llama has no biases, and repeats keys and values for each head (2 kernels more each way).

    Forward there are 2 norms, 4 of the softmax, the copy of the context, SwiGLU, and 2 sums. Of q and of k 6 make
    cosines and sines, and 6 turn (cos, negated half, join, sin, sum, join with nothing): 10 + 2 + 24.

    Backward there are 2 x 4 of the norms, 4 of the softmax, the join, SwiGLU, and a sum for each of 4 weights. Of q and
    of k there are 7 (sin, negated half, join, cos, sum, zeros, their sum): 8 + 4 + 1 + 1 + 4 + 2 + 14.
    """
    part = models.layer(load(LLAMA))
    assert kinds(part.forward) == {"product": 6, "memory": 36}
    assert kinds(part.backward) == {"product": 12, "memory": 34}


def test_scores_go_through_fp32() -> None:
    """Bytes of an element: casts read 2 and write 4 or the other way; mask and softmax read and write 4.

    Backward the softmax reads its gradient and its output and writes 4, and the mask's copy reads and writes 4.
    """
    part = models.layer(load(GPT))
    assert around_scores(part.forward) == [("upcast", 6), ("strided", 8), ("softmax", 8), ("cast", 6)]
    assert around_scores(part.backward) == [("upcast", 6), ("softmax_bwd", 12), ("mask", 8), ("cast", 6)]


def test_the_softmax_keeps_its_output_in_both_types() -> None:
    """The softmax keeps 4 bytes of a score, the product after it 2."""
    saved = {tensor.name: tensor.nbytes for tensor in models.layer(load(GPT)).saved}
    assert saved["attn.probs fp32"] == 4 * SCORES
    assert saved["attn.probs"] == 2 * SCORES


def test_the_buffer_of_scores_is_there_once() -> None:
    """All layers share the buffer that products are added to with a factor of 0."""
    one, another = (models.layer(load(GPT), number=number).placeholders for number in (0, 1))
    assert [tensor.nbytes for tensor in one] == [2 * SCORES]
    assert one == another


# --- the end of a step ---


def test_each_tensor_has_kernels_of_its_own_around_the_update() -> None:
    """A layer has 12 weights (2 norms and 4 linear layers, each with a bias), the model 3 more and the last norm's 2.

    There are 2 layers: 29 norms, as many copies to the host, products by the clipping factor, copies back, and copies
    to bf16. The host waits for the norms, and then for what it reads.
    """
    workload = load(GPT | {"tied_embeddings": False}, training={"grad_clip": 1.0})
    weights = [weight for stage in range(1) for part in models.stage_parts(workload, stage) for weight in part.weights]
    kernels = {
        op.name.removeprefix("optimizer."): op for op in optimizer_ops(workload, weights) if isinstance(op, Compute)
    }
    launches = {name: op.kernel.launches for name, op in kernels.items() if isinstance(op.kernel, Memory)}
    tensors = 2 * 12 + 3 + 2
    names = ("grad norm", "grad norms to host", "clip", "clip copy", "master to model weights")
    assert {name: count for name, count in launches.items() if count} == dict.fromkeys(names, tensors)
    assert [name for name, op in kernels.items() if op.host_waits] == ["grad norm", "grad norms to host"]


# --- limits and defaults ---


@pytest.mark.parametrize(
    ("model", "sections", "key"),
    [
        ({"attention": "flash"}, {}, "model.attention"),
        ({"activation": "relu"}, {}, "model.activation"),
        ({}, {"parallelism": {"cp": 2}}, "parallelism.cp"),
        ({}, {"parallelism": {"zero": 3}}, "parallelism.zero"),
    ],
)
def test_what_local_modules_lack_is_refused(model: dict[str, Any], sections: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError) as caught:
        load(GPT | model, **sections)
    assert caught.value.key == key


@pytest.mark.parametrize("chosen", [{"dispatcher": "hybridep"}, {"overlap": {"expert_all_to_all": True}}])
def test_only_frameworks_are_told_that_can_do_it(chosen: dict[str, Any]) -> None:
    """Other dispatchers and hidden all-to-alls are Megatron-Core's with Transformer Engine, and PyTorch refuses both.

    The permutation, which the file does not mention, is by PyTorch's kernels in local modules anyhow.
    """
    experts = {**LLAMA, "moe": {"experts": 4, "top_k": 2, "ffn_hidden": 256}}
    layout = {"dp": 2, "ep": 2, **chosen}
    with pytest.raises(InputError) as caught:
        load(experts, training={"global_batch": 4 * BATCH}, parallelism=layout)
    assert (caught.value.key or "").startswith("parallelism.")
    assert caught.value.fix == "framework: megatron_core"


def test_defaults() -> None:
    workload = load(GPT, parallelism={"pp": 2, "dp": 1})
    assert workload.model.attention == "unfused"
    assert workload.training.optimizer.implementation == "foreach"
    assert not workload.parallelism.overlap.p2p
    assert not workload.training.gradient_accumulation_fusion


@pytest.mark.parametrize(("chosen", "etp"), [({}, 2), ({"etp": 1}, 1), ({"ep": 8}, 1)])
def test_experts_are_split_as_other_layers_are(chosen: dict[str, int], etp: int) -> None:
    """``expert_tensor_parallel_size`` of Megatron-Core is ``tensor_model_parallel_size`` where it is left open.

    With 8 ranks of each expert's part there are none left to split it."""
    moe = {"experts": 8, "top_k": 2, "ffn_hidden": 512}
    job = {"name": "small", "model": {**LLAMA, "moe": moe}, "training": {"seq": SEQ, "global_batch": 8}}
    layout = {"tp": 2, "dp": 4, "ep": 2, **chosen}
    assert load_workload({**job, "cluster": "hgx_h200_8gpu", "parallelism": layout}).parallelism.etp == etp


# --- a real trace ---

#: Class of kernels on scores -> parts of their names in a trace, one for each kernel that the class stands for.
NAMES = {
    "upcast": ("direct_copy_kernel_cuda",),
    "strided": ("elementwise_kernel<128, 2",),
    "softmax": ("softmax_warp_forward",),
    "cast": ("bfloat16_copy_kern",),
    "softmax_bwd": ("BinaryFunctor<floa", "oft[Mm]ax(_warp_b|B)ackward"),
    "mask": ("Memcpy DtoD", "elementwise_kernel<128, 2"),
}
#: Seconds from which on kernels are those on scores, but for a few of the loss and of the embedding.
LONG = 150e-6


@pytest.mark.parametrize("name", ["mc1_gpt345m", "mc1_gpt1.7b", "mc1_gpt3.6b_full"])
def test_kernels_on_scores_take_what_they_took(name: str) -> None:
    """Classes of kernels take what they took in a real step; the profile has most figures from another model's run."""
    workload = load_workload(RUNS / f"{name}.yaml")
    part, costs = models.layer(workload), Costs.from_profile(profile(), workload.software)
    kernels = kernels_on_scores((*part.forward, *part.backward))
    simulated = {kernel.op: costs.kernel_s(kernel, costs.gpu) for kernel in kernels}
    assert simulated == pytest.approx(seconds_on_scores(name), rel=0.06)


def seconds_on_scores(name: str) -> dict[str, float]:
    """Seconds of the classes of `NAMES`, from the median of each kernel's."""
    with gzip.open(RECORDS / f"{name}.timeline.csv.gz", "rt", encoding="utf-8", newline="") as file:
        rows = [(row["name"], float(row["end_s"]) - float(row["start_s"])) for row in csv.DictReader(file)]

    def usual(part: str) -> float:
        return median(seconds for kernel, seconds in rows if seconds > LONG and re.search(part, kernel))

    return {op: sum(map(usual, parts)) for op, parts in NAMES.items()}

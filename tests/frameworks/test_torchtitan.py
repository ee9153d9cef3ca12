"""torchtitan's Llama 3: kernels and exchanges counted by hand from its source, what it keeps, and its host's work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from simulator import models
from simulator.config import Workload, load_workload
from simulator.config.profile import load_profile
from simulator.costs import launch
from simulator.errors import InputError
from simulator.models.vocabulary import head
from simulator.operations.nodes import Op
from simulator.operations.shapes import Turn
from simulator.program import Collective, Compute, Matmul, Memory

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, BATCH, SEQ = 2, 256, 4, 2, 64, 512, 1024, 2, 128
TOKENS = BATCH * SEQ
#: The first micro-batch, whose gradients nothing is added to.
FIRST = Turn(first=True)
LLAMA: dict[str, Any] = {
    **{"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM},
    **{"ffn_hidden": FFN, "vocab": VOCAB, "activation": "swiglu", "norm": "rmsnorm", "position": "rope"},
    **{"bias": False, "tied_embeddings": False},
}


def load(parallelism: dict[str, Any] | None = None, *, compile: bool = False, **training: Any) -> Workload:
    settings = {"seq": SEQ, "micro_batch": BATCH, "global_batch": BATCH, "optimizer": {"master_weights": False}}
    return load_workload(
        {
            "name": "small",
            "model": LLAMA,
            "framework": {"name": "torchtitan", "compile": compile},
            "training": settings | training,
            "parallelism": parallelism or {},
            "cluster": "hgx_h200_8gpu",
        }
    )


def exchanges(ops: Iterable[Op]) -> Counter[str]:
    return Counter(str(op.op) for op in ops if isinstance(op, Collective))


def bytes_by_name(ops: Iterable[Op]) -> dict[str, tuple[float, float]]:
    return {
        op.name: (op.kernel.read_bytes, op.kernel.write_bytes)
        for op in ops
        if isinstance(op, Compute) and isinstance(op.kernel, Memory)
    }


def test_keys_and_values_are_copied_to_every_query_head() -> None:
    """4 heads of queries share 2 of keys: a copy reads 256 tokens x 128 x 2 bytes and writes twice that. Attention
    keeps queries, and keys and values as wide as these. Going back, the two copies of a gradient are added."""
    part = models.layer(load(), turn=FIRST)
    narrow, wide = 2.0 * TOKENS * KV_HEADS * HEAD_DIM, 2.0 * TOKENS * HEADS * HEAD_DIM
    forward, backward = bytes_by_name(part.forward), bytes_by_name(part.backward)
    assert forward["attn.repeat k"] == forward["attn.repeat v"] == (narrow, wide)
    assert backward["attn.repeat k bwd"] == backward["attn.repeat v bwd"] == (wide, narrow)
    saved = {tensor.name: tensor.nbytes for tensor in part.saved}
    assert saved["attn.q"] == saved["attn.k expanded"] == saved["attn.v expanded"] == wide
    assert "attn.k" not in saved


@pytest.mark.parametrize("compile", [False, True])
def test_positions_go_through_complex_numbers_in_fp32(compile: bool) -> None:
    """Queries of 2 bytes become 4 wide, are multiplied as pairs of 4 bytes, and are cast back; so are gradients."""
    part = models.layer(load(compile=compile), turn=FIRST)
    q = 2.0 * TOKENS * HEADS * HEAD_DIM
    forward, backward = bytes_by_name(part.forward), bytes_by_name(part.backward)
    for kernels, suffix in ((forward, ""), (backward, " bwd")):
        assert kernels[f"attn.rope q float{suffix}"] == (q, 2 * q)
        assert kernels[f"attn.rope q complex{suffix}"] == (2 * q, 2 * q)
        assert kernels[f"attn.rope q cast{suffix}"] == (2 * q, q)


def test_split_layers_gather_once_and_keep_what_they_gathered() -> None:
    """Each block gathers its input once for all of its products, and scatters its output. Going back, the gradient of
    the output is gathered, and that of the input is scattered once, behind the sum over q, k and v, or gate and up.
    Nothing is gathered for weight gradients: of 256 tokens x 256 x 2 bytes the whole is kept, for both blocks."""
    part = models.layer(load({"tp": 2, "sequence_parallel": True}), turn=FIRST)
    assert exchanges(part.forward) == {"all_gather": 2, "reduce_scatter": 2}
    assert exchanges(part.backward) == {"all_gather": 2, "reduce_scatter": 2}
    saved = {tensor.name: tensor.nbytes for tensor in part.saved}
    assert saved["attn.normed gathered"] == saved["mlp.normed gathered"] == 2.0 * TOKENS * HIDDEN
    names = [op.name for op in part.backward]
    assert names.index("attn.q input grad") < names.index("tp.reduce_scatter attn")
    assert names.index("mlp.gate input grad") < names.index("tp.reduce_scatter mlp")


def test_rows_of_split_layers_are_put_in_order_by_copies() -> None:
    """Functional collectives join and cut the first dimension, and sequences are the second: a copy of all rows behind
    each of 2 + 2 gatherings, and one before each of 2 + 2 scatterings."""
    part = models.layer(load({"tp": 2, "sequence_parallel": True}), turn=FIRST)
    for ops in (part.forward, part.backward):
        copies = [op.name for op in ops if isinstance(op, Compute) and op.name.startswith("tp.")]
        assert Counter(name.split()[-1] for name in copies) == {"join": 2, "cut": 2}


def test_loss_of_split_logits_by_hand() -> None:
    """Of a rank's half of the logits: to fp32 (2, 4), maximum (4), difference, exponential, sum (4), difference; back a
    tensor of zeros (0, 4), exponential, sum of both (8, 4), product, to 2 bytes. Three numbers go over the ranks."""
    part = head(load({"tp": 2, "sequence_parallel": True}))
    logits = TOKENS * VOCAB / 2
    forward, backward = bytes_by_name(part.forward), bytes_by_name(part.backward)
    loss = {name: (r / logits, w / logits) for name, (r, w) in (forward | backward).items() if name.startswith("loss.")}
    assert loss == {
        "loss.cast": (2, 4),
        "loss.max": (4, 0),
        "loss.subtract": (4, 4),
        "loss.exp": (4, 4),
        "loss.sum": (4, 0),
        "loss.log_softmax": (4, 4),
        "loss.nll bwd": (0, 4),
        "loss.exp bwd": (4, 4),
        "loss.add bwd": (8, 4),
        "loss.scale bwd": (4, 4),
        "loss.cast bwd": (4, 2),
    }
    assert exchanges(part.forward)["all_reduce"] == 3


def test_a_host_dispatches_dtensors_where_layers_are_split() -> None:
    """A product, norm or collective of a split layer takes the dispatch longer; an elementwise kernel does not.

    Of compiled layers it is what redistributes a tensor. Layers that are whole are no DTensors."""
    split_layout = {"tp": 2, "sequence_parallel": True}
    dispatched = load(split_layout).software.work_on_dtensors
    costs = load_profile("h200-sxm-141gb").host.launch_s["torchtitan"]
    whole, split = launch.launch_seconds(costs), launch.launch_seconds(costs, dtensors=dispatched)
    assert {*dispatched} == {"forward_matmul", "backward_matmul", "forward_norm", "backward_norm", "collective"}
    for kind in dispatched:
        assert split[kind] - whole[kind] == pytest.approx(costs.around_s["dtensor"])
    assert split["forward_other"] == whole["forward_other"]
    assert load(split_layout, compile=True).software.work_on_dtensors == ("collective",)
    assert load().software.work_on_dtensors == load(compile=True).software.work_on_dtensors == ()


def test_compiled_layers_are_run_again_as_far_as_they_are_needed() -> None:
    """The last product of a layer and the sum behind it are in no gradient: 6 of 7 products are run again."""
    part = models.layer(load(compile=True, recompute={"granularity": "full"}))
    ops = [op for op in part.recompute if isinstance(op, Compute)]
    assert sum(isinstance(op.kernel, Matmul) for op in ops) == 6


def test_clipping_and_update_are_dispatched_for_every_weight() -> None:
    """Two layers of nine weights (q, k, v, o, gate, up, down, two norms), two tables and the last norm: 21. Whole
    weights are one list for one kernel."""

    def listed(workload: Workload) -> int:
        weights = models.weights_of(models.rank_parts(workload, 0))
        (norm,) = [op for op in models.optimizer_ops(workload, weights) if op.name == "optimizer.grad norm"]
        assert isinstance(norm, Compute)
        assert isinstance(norm.kernel, Memory)
        assert launch.issued(norm) == {"optimizer": 1} | ({"dtensor_update": 21} if norm.kernel.parts else {})
        return norm.kernel.parts

    assert listed(load({"tp": 2, "sequence_parallel": True}, grad_clip=1.0)) == 21
    assert listed(load(grad_clip=1.0)) == 0


@pytest.mark.parametrize(("master", "kept"), [(False, "bf16"), (True, "fp32")])
def test_defaults_follow_the_type_of_the_weights(master: bool, kept: str) -> None:
    """Gradients and states have the type of the weights; AdamW is fused; the vocabulary is not padded."""
    workload = load(optimizer={"master_weights": master})
    assert workload.training.grad_dtype == workload.training.optimizer.state_dtype == kept
    assert workload.training.optimizer.implementation == "fused"
    assert workload.model.padded_vocab(1) == VOCAB
    assert load({"tp": 2}).training.loss.name == "loss_parallel"
    assert load(compile=True).training.loss.name == "compiled"


@pytest.mark.parametrize(
    ("section", "key"),
    [({"cp": 2}, "parallelism.cp"), ({"dp": 2, "zero": 1}, "parallelism.zero")],
)
def test_what_is_not_simulated_is_refused(section: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError, match=key):
        load(section, global_batch=2 * BATCH)


@pytest.mark.parametrize("compile", [False, True])
def test_weights_in_fp32_that_nobody_shards_are_cast_where_products_read_them(compile: bool) -> None:
    """`training.dtype: float32` on one GPU is torch.autocast: gradients are in fp32, and weights have no copy."""
    workload = load(compile=compile, optimizer={"master_weights": True})
    assert workload.software.autocasts(workload.traits)
    assert workload.replication.weights_are_masters
    sharded = load({"dp": 2, "zero": 3}, compile=compile, global_batch=2 * BATCH, optimizer={"master_weights": True})
    assert not sharded.software.autocasts(sharded.traits)


def test_products_of_a_layer() -> None:
    """Seven products forward (q, k, v, o, gate, up, down), and two of each going back."""
    part = models.layer(load(), turn=FIRST)
    products = [
        [op for op in ops if isinstance(op, Compute) and isinstance(op.kernel, Matmul)]
        for ops in (part.forward, part.backward)
    ]
    assert [len(ops) for ops in products] == [7, 14]


def deepseek(changes: dict[str, Any]) -> Workload:
    """A small DeepSeek-V3 of torchtitan's."""
    model = {
        **{"layers": 2, "hidden": 256, "heads": 4, "ffn_hidden": 512, "vocab": VOCAB, "activation": "swiglu"},
        **{"norm": "rmsnorm", "position": "rope", "bias": False, "tied_embeddings": False},
        "mla": {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32},
        "moe": {"experts": 8, "top_k": 2, "ffn_hidden": 128, "shared_experts": 1, "first_dense_layers": 1},
    }
    parallelism = {"dp": 2, "ep": 2, "zero": 3}
    training = {"seq": 256, "global_batch": 4}
    names = {"name": "deepseek", "framework": "torchtitan", "cluster": "dgx_h100"}
    return load_workload({**names, "model": model, "training": training, "parallelism": parallelism}, changes)


def test_a_layer_of_deepseek_v3_has_the_products_of_its_modules() -> None:
    """Queries, keys and values down and up, the output; router; gate with up, and down, of the shared expert: seven.

    Two are grouped, gate with up and down, as all experts have them here. The router is of the working precision."""
    workload = deepseek({})
    part = models.layer(workload, number=1)
    kernels = Counter(type(op.kernel).__name__ for op in part.forward if isinstance(op, Compute))
    assert (kernels["Matmul"], kernels["GroupedMatmul"]) == (7, 2)
    assert workload.model.moe is not None
    assert workload.model.moe.router_dtype == "bf16"


@pytest.mark.parametrize("changes", [{"framework.compile": True}, {"parallelism.tp": 2, "parallelism.dp": 1}])
def test_experts_compiled_or_split_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"model\.(moe|mla)"):
        deepseek(changes)


@pytest.mark.parametrize(("loss", "width"), [("eager", 4), ("eager_narrow", 2)])
def test_a_loss_that_is_not_parallel_gathers_all_logits(loss: str, width: int) -> None:
    """``disable_loss_parallel``: two ranks gather bf16 logits of the whole vocabulary, and each has the whole loss."""
    tokens = BATCH * SEQ
    head = models.rank_parts(load({"tp": 2}, loss=loss), 0)[-1]
    (gather,) = [op for op in head.forward if op.name == "tp.all_gather logits"]
    assert isinstance(gather, Collective)
    assert gather.nbytes == 2 * tokens * VOCAB
    (log_softmax,) = [op for op in head.forward if op.name == "loss.log_softmax"]
    assert isinstance(log_softmax, Compute)
    assert isinstance(log_softmax.kernel, Memory)
    assert log_softmax.kernel.write_bytes == width * tokens * VOCAB
    assert not [op for op in head.forward if op.name.startswith("tp.all_reduce")]


def test_each_product_may_gather_its_input_and_sum_its_gradient_by_itself() -> None:
    """``ColwiseParallel(input_layouts=Shard(1))``: q, k, v, gate and up gather 5 times forward, sum 5 times backward.
    The other way round it is the same twice as before, for o and down. The five gathered inputs are kept, and the
    gradients of their shares are added: half of the rows for each of two ranks."""
    part = models.layer(load({"tp": 2, "gather_per_product": True}), turn=FIRST)
    assert exchanges(part.forward) == {"all_gather": 5, "reduce_scatter": 2}
    assert exchanges(part.backward) == {"all_gather": 2, "reduce_scatter": 5}
    gathered = [tensor.nbytes for tensor in part.saved if " gathered for " in tensor.name]
    assert gathered == [2.0 * TOKENS * HIDDEN] * 5
    added = [op for op in part.backward if op.name.endswith("input grad")]
    assert len(added) == 3  # of q and k, of gate
    for op in added:
        assert isinstance(op, Compute)
        assert isinstance(op.kernel, Memory)
        assert op.kernel.write_bytes == 2 * TOKENS / 2 * HIDDEN
    with pytest.raises(InputError, match="products of split layers alone gather"):
        load({"gather_per_product": True})
    with pytest.raises(InputError, match="nothing is gathered where every rank has all rows"):
        load({"tp": 2, "sequence_parallel": False, "gather_per_product": True})


def test_megatron_core_gathers_once_for_all_products() -> None:
    with pytest.raises(InputError, match=r"megatron_core gathers rows once(.|\n)*framework: torchtitan"):
        load_workload(
            {
                "name": "small",
                "model": LLAMA,
                "training": {"seq": SEQ, "global_batch": 8},
                "parallelism": {"tp": 2, "gather_per_product": True},
                "cluster": "hgx_h200_8gpu",
            }
        )


def test_it_has_no_adapters_and_no_frozen_weights_under_autocast() -> None:
    """It runs under torch.autocast with weights in fp32 and DistributedDataParallel. Fixes name others alone."""
    with pytest.raises(
        InputError, match=r"LoRA of torchtitan is not simulated(.|\n)*allowed: framework: megatron_core"
    ):
        load(adapters={"rank": 4, "targets": ["q"]})
    with pytest.raises(InputError, match=r"frozen weights under torch\.autocast") as error:
        load(freeze=["embedding"], optimizer={"master_weights": True})
    assert error.value.fix is not None
    assert "torchtitan" not in error.value.fix


def test_a_version_of_it_is_none_of_pytorch() -> None:
    with pytest.raises(InputError, match="nothing that is simulated of torchtitan depends on its version"):
        load_workload(
            {
                "name": "small",
                "model": LLAMA,
                "framework": {"name": "torchtitan", "version": "0.2.1"},
                "training": {"seq": SEQ, "global_batch": 8},
                "cluster": "hgx_h200_8gpu",
            }
        )

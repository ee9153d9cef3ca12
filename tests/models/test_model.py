"""Kernels, activations, communication, parameters and FLOPs of a transformer, against the papers' closed forms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from simulator import models
from simulator.config import Workload, load_workload
from simulator.models import Turn
from simulator.operations.weights import Weight, elements
from simulator.program import Attention, Beside, Comm, Compute, GroupedMatmul, Matmul, Memory
from tests.support.frameworks import COMPILED, MEGATRON, PYTORCH, STACKS
from tests.support.grids import every_pair

SIZES = [(512, 1, 1024, 8), (1024, 2, 2048, 16), (2048, 1, 1536, 24)]  # s, b, h, a
GELU: dict[str, Any] = {"attention": "unfused", "dropout": 0.1}
LLAMA: dict[str, Any] = {
    "activation": "swiglu",
    "norm": "rmsnorm",
    "position": "rope",
    "bias": False,
    "tied_embeddings": False,
}


def make(s: int, b: int, h: int, a: int, **settings: Any) -> Workload:
    """A four-layer model; ``settings`` go to the section of the workload that has such a key."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"layers": 4, "hidden": h, "heads": a, "vocab": 51200},
        "training": {"seq": s, "micro_batch": b, "global_batch": 8 * b, "precision": "fp16"},
        "parallelism": {},
    }
    framework = settings.pop("framework", MEGATRON)
    for key, value in settings.items():
        home = next(name for name, fields in FIELDS.items() if key in fields)
        sections[home][key] = value
    return load_workload({**sections, "framework": framework, "cluster": "dgx_a100"})


FIELDS = {name: Workload.model_fields[name].annotation.model_fields for name in ("model", "training", "parallelism")}  # type: ignore[union-attr]


def vector(n: int) -> tuple[Weight, ...]:
    """One weight of ``n`` elements."""
    return (Weight("vector", (n,), (n,), "bf16"),)


def comms(ops: Iterable[object]) -> list[tuple[str, float]]:
    return [(op.op, op.nbytes) for op in ops if isinstance(op, Comm)]


def flops(ops: Iterable[object]) -> float:
    return sum(op.kernel.flops for op in ops if isinstance(op, Compute))


def matmuls(ops: Iterable[object], role: str, *, batched: bool) -> list[Matmul]:
    kernels = [op.kernel for op in ops if isinstance(op, Compute)]
    return [k for k in kernels if isinstance(k, Matmul) and k.role == role and (k.batch > 1) == batched]


def traffic(ops: Iterable[object], name: str) -> tuple[float, float]:
    """Bytes read and written by the one memory kernel called ``name``."""
    (kernel,) = (op.kernel for op in ops if isinstance(op, Compute) and op.name == name)
    assert isinstance(kernel, Memory)
    return kernel.read_bytes, kernel.write_bytes


# --- activation memory ---


@pytest.mark.parametrize(("s", "b", "h", "a"), SIZES)
@pytest.mark.parametrize("t", [1, 2, 4, 8])
def test_saved_bytes_are_those_of_korthikanti(s: int, b: int, h: int, a: int, t: int) -> None:
    """2205.05198, section 4.1, in units of s b h bytes: inputs of norms 2 x 2, of the qkv and fc1 products 2 x 2, masks
    of the two dropouts 2 x 1: 10, on every rank. Q, K, V 6, inputs of proj 2, GELU 8 and fc2 8: 24, split over tp, as
    are the a s^2 b of softmax 2, its mask 1 and the dropout's output 2. Sequence parallelism splits the 10 too."""
    sbh, square = s * b * h, a * s * s * b
    plain = models.layer(make(s, b, h, a, tp=t, sequence_parallel=False, **GELU))
    assert plain.saved_bytes == sbh * (10 + 24 / t) + 5 * square / t
    split = models.layer(make(s, b, h, a, tp=t, sequence_parallel=True, **GELU))
    assert split.saved_bytes == (34 * sbh + 5 * square) / t


@pytest.mark.parametrize(("s", "b", "h", "a"), SIZES)
@pytest.mark.parametrize(("t", "sequence_parallel"), [(1, False), (4, False), (4, True)])
def test_what_options_take_from_saved_bytes(s: int, b: int, h: int, a: int, t: int, sequence_parallel: bool) -> None:
    sbh, square = s * b * h, a * s * s * b
    share = t if sequence_parallel else 1

    def saved(**changes: Any) -> float:
        settings = {**GELU, "tp": t, "sequence_parallel": sequence_parallel, **changes}
        return models.layer(make(s, b, h, a, **settings)).saved_bytes

    every = saved()
    # No dropout: no mask of s b h after attention and MLP, none of a s^2 b on the softmax, whose output is then itself
    # what the second product keeps (2 a s^2 b less).
    assert every - saved(dropout=0.0) == 2 * sbh / share + 3 * square / t
    # Flash attention keeps nothing of size s^2; a fp32 log-sum-exp per head and query instead.
    assert every - saved(attention="flash") == (5 * square - 4 * a * s * b) / t
    # Selective recomputation keeps Q, K, V and drops what lies between the attention's products.
    assert every - saved(recompute="selective") == 5 * square / t
    # With flash that is the log-sum-exp alone.
    assert saved(attention="flash") - saved(attention="flash", recompute="selective") == 4 * a * s * b / t
    # Full recomputation keeps the layer's input.
    assert saved(recompute="full") == 2 * sbh / share
    # ReLU keeps its output, which fc2 keeps anyway: without the 8 s b h of GELU's input.
    assert every - saved(activation="relu") == 8 * sbh / t
    # fp32: each of the 2-byte tensors takes 4; the masks (2 s b h and a s^2 b) stay.
    assert saved(precision="fp32") == 2 * every - 2 * sbh / share - square / t


@every_pair(
    {
        "s, b, h, a": SIZES,
        "groups": [1, 2, 4],
        "t, framework": [(1, MEGATRON), (2, MEGATRON), (2, PYTORCH), (2, COMPILED)],
    }
)
def test_saved_bytes_of_llama(s: int, b: int, h: int, a: int, groups: int, t: int, framework: Any) -> None:
    """Norm inputs 4 and product inputs 4 s b h; Q and context 2 each, K and V 2 / groups each; gate and up 2 x 2 f/h
    and the down product's input 2 f/h; the log-sum-exp. Eager keeps SiLU's output too, as an operand of the gate's
    product, and with V, a view, all of the product that Q and K before their rotation are part of."""
    f = 3 * h
    settings = {**LLAMA, "kv_heads": a // groups, "ffn_hidden": f, "framework": framework}
    part = models.layer(make(s, b, h, a, tp=t, **settings))
    gate = 8 if framework == PYTORCH else 6
    whole = 2 * h + 2 * h / groups if framework == PYTORCH else 0
    expected = s * b * (8 * h + 4 * h + 4 * h / groups + whole + gate * f + 4 * a) / t
    assert part.saved_bytes == pytest.approx(expected, rel=1e-12)
    assert len({tensor.name for tensor in part.saved}) == len(part.saved)


def test_unfused_attention_of_grouped_heads_keeps_expanded_keys_and_values() -> None:
    """Repeating K and V for each query head makes copies of full width: 2 + 2 + 2 s b h as without groups. Selective
    recomputation repeats them again and keeps the narrow ones."""
    s, b, h, a = SIZES[0]
    whole = make(s, b, h, a, **GELU)
    grouped = make(s, b, h, a, kv_heads=a // 4, **GELU)
    assert models.layer(grouped).saved_bytes == models.layer(whole).saved_bytes
    narrow = models.layer(grouped, recompute="selective").saved_bytes
    assert models.layer(whole, recompute="selective").saved_bytes - narrow == 2 * (2 * s * b * h) * 3 / 4


@pytest.mark.parametrize("framework", STACKS)
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("attention", ["flash", "unfused"])
def test_recomputed_tensors_exist_again_in_the_backward_pass(framework: Any, recompute: str, attention: str) -> None:
    """What is kept, and what comes back while the layer's backward runs, is together what is kept without recomputation
    (and the inputs of the recomputed part, where these are not among it)."""
    work = make(*SIZES[0], **{**GELU, "attention": attention, "framework": framework})
    none, some = models.layer(work, recompute="none"), models.layer(work, recompute=recompute)
    assert set(some.saved) | set(some.recomputed) == set(none.saved)
    assert some.workspace_bytes - none.workspace_bytes == none.saved_bytes - some.saved_bytes > 0


@pytest.mark.parametrize(("s", "b", "h", "a"), SIZES)
@pytest.mark.parametrize("t", [1, 4])
def test_saved_bytes_of_embedding_and_head(s: int, b: int, h: int, a: int, t: int) -> None:
    """2205.05198, section 4.3: the embedding's dropout mask s b h / t; in the head the norm's and the product's input,
    2 s b h / t each, and fp32 probabilities 4 s b v / t."""
    work = make(s, b, h, a, tp=t, **GELU)
    assert models.embedding(work).saved_bytes == s * b * h / t
    v = work.model.padded_vocab(t)
    assert models.head(work).saved_bytes == 4 * s * b * h / t + 4 * s * b * v / t
    # Each rank doing the whole vocabulary keeps all probabilities and the whole input of the product.
    whole = models.head(make(s, b, h, a, tp=t, vocab_parallel=False, **GELU))
    assert whole.saved_bytes == 2 * s * b * h / t + 2 * s * b * h + 4 * s * b * v


# --- communication ---


@pytest.mark.parametrize(("s", "b", "h", "a"), SIZES)
@pytest.mark.parametrize("t", [2, 4, 8])
@pytest.mark.parametrize("model_keys", [GELU, LLAMA])
def test_tensor_parallel_volumes(s: int, b: int, h: int, a: int, t: int, model_keys: dict[str, Any]) -> None:
    """Two all-reduces of b s h elements forward and two backward; a ring all-reduce of n bytes sends 2 n (t-1)/t, so 8
    b s h elements move for large t; two more all-reduces under full recomputation."""
    message = 2.0 * b * s * h
    settings = {"tp": t, "sequence_parallel": False, "recompute": "full", **model_keys}
    part = models.layer(make(s, b, h, a, **settings))
    for ops in (part.forward, part.recompute, part.backward, part.input_grad):
        assert comms(ops) == [("all_reduce", message)] * 2
    assert comms(part.weight_grad) == []
    sent = sum(2 * nbytes for _, nbytes in comms((*part.forward, *part.backward)))
    assert sent == 8 * b * s * h * 2


@pytest.mark.parametrize(("s", "b", "h", "a"), SIZES)
@pytest.mark.parametrize("t", [2, 4, 8])
def test_sequence_parallel_volumes(s: int, b: int, h: int, a: int, t: int) -> None:
    """Each all-reduce becomes an all-gather and a reduce-scatter of the same message (together as many bytes); the
    shards of the two column products' inputs are gathered once more for their weight gradients."""
    part = models.layer(make(s, b, h, a, tp=t, recompute="full", **GELU))
    message = 2.0 * b * s * h
    pair = [("all_gather", message), ("reduce_scatter", message)]
    assert comms(part.forward) == comms(part.recompute) == pair * 2
    assert comms(part.input_grad) == pair * 2
    assert comms(part.weight_grad) == [("all_gather", message)] * 2
    assert Counter(comms(part.backward)) == Counter(pair * 2 + [("all_gather", message)] * 2)


@pytest.mark.parametrize("position", ["learned", "rope"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_vocabulary_parallel_communication(position: str, sequence_parallel: bool) -> None:
    """Lookup results are summed (scattered where no positions have to be added first), their gradients gathered where
    they were scattered. The loss all-reduces three fp32 numbers per token."""
    s, b, h, a = SIZES[0]
    work = make(s, b, h, a, tp=4, sequence_parallel=sequence_parallel, position=position)
    embedding, head = models.embedding(work), models.head(work)
    message, numbers = 2.0 * b * s * h, [("all_reduce", 4.0 * b * s)] * 3
    scattered = sequence_parallel and position == "rope"
    assert comms(embedding.forward) == [("reduce_scatter" if scattered else "all_reduce", message)]
    assert comms(embedding.backward) == ([("all_gather", message)] if sequence_parallel else [])
    if sequence_parallel:
        assert comms(head.forward) == [("all_gather", message), *numbers]
        assert comms(head.backward) == [("all_gather", message), ("reduce_scatter", message)]
    else:
        assert comms(head.forward) == numbers
        assert comms(head.backward) == [("all_reduce", message)]


@pytest.mark.parametrize("framework", [PYTORCH, MEGATRON])
def test_a_split_vocabulary_as_pytorch_launches_it(framework: Any) -> None:
    """Eager: rows of foreign words are filled under a mask, forward and backward, in all of the result; what takes from
    logits a number per row, divides by one, or scales all has no vector loads. Megatron zeroes the foreign rows."""
    s, b, h, a = SIZES[0]
    work = make(s, b, h, a, tp=4, sequence_parallel=False, framework=framework)
    embedding, head = models.embedding(work), models.head(work)
    found = {
        op.name: op.kernel
        for op in (*embedding.forward, *embedding.backward, *head.forward, *head.backward)
        if isinstance(op, Compute) and isinstance(op.kernel, Memory)
    }
    whole = 2.0 * b * s * h
    masks = {name: (k.op, k.read_bytes, k.write_bytes) for name, k in found.items() if "embedding.mask" in name}
    by_row = [found[f"loss.{name}"].op for name in ("subtract", "normalise", "bwd")]
    if framework == PYTORCH:
        assert masks == dict.fromkeys(("embedding.mask", "embedding.mask bwd"), ("mask", whole, whole))
        assert by_row == ["strided"] * 3
    else:
        assert masks == {"embedding.mask": ("embedding", 0, whole * 3 / 4)}
        assert by_row == ["residual"] * 3


def test_whole_vocabulary_on_every_rank_needs_no_sums() -> None:
    s, b, h, a = SIZES[0]
    work = make(s, b, h, a, tp=4, sequence_parallel=False, vocab_parallel=False)
    for part in (models.embedding(work), models.head(work)):
        assert comms((*part.forward, *part.backward)) == []
    split = make(s, b, h, a, tp=4, sequence_parallel=False)
    assert elements(models.embedding(work).weights) - s * h == 4 * (elements(models.embedding(split).weights) - s * h)


@pytest.mark.parametrize("model_keys", [GELU, LLAMA])
def test_one_rank_does_not_communicate(model_keys: dict[str, Any]) -> None:
    work = make(*SIZES[0], recompute="full", grad_clip=1.0, **model_keys)
    for part in models.stage_parts(work, 0):
        assert comms((*part.forward, *part.recompute, *part.backward)) == []
    assert comms(models.optimizer_ops(work, vector(1000))) == []
    assert models.replicated_gradient_ops(work, models.weights_of(models.stage_parts(work, 0))) == ()


# --- kernels ---


@every_pair(
    {
        "framework": STACKS,
        "t": [1, 2],
        "sequence_parallel": [False, True],
        "model_keys": [GELU, {}, LLAMA, {**LLAMA, "attention": "unfused", "kv_heads": 2}, {"activation": "relu"}],
    }
)
def test_unsplit_backward_is_input_and_weight_gradients(
    framework: Any, t: int, sequence_parallel: bool, model_keys: dict[str, Any]
) -> None:
    """The same kernels in another order, each with its phase; and the recomputation is the forward pass again, in plain
    PyTorch up to what the backward pass needs: not the last sum, nor the product before it unless it is split."""
    work = make(
        *SIZES[0],
        framework=framework,
        tp=t,
        sequence_parallel=sequence_parallel,
        recompute="full",
        **model_keys,
    )
    for part in models.stage_parts(work, 0):
        assert Counter(part.backward) == Counter((*part.input_grad, *part.weight_grad))
        for ops, phase in ((part.forward, "F"), (part.input_grad, "B"), (part.weight_grad, "W"), (part.recompute, "R")):
            assert {op.phase for op in ops if isinstance(op, Compute)} <= {phase}
    layer = models.layer(work)
    again, whole = ([op.name for op in ops] for ops in (layer.recompute, layer.forward))
    assert again == whole[: len(again)]
    stops = framework == PYTORCH and not work.model.dropout
    left = {name for name in whole[len(again) :] if name.startswith("mlp")}
    assert left == ({"mlp.residual"} | ({"mlp.fc2"} if t == 1 else {"mlp.fc2 bias"} & set(whole)) if stops else set())
    names = [op.name for op in layer.forward if isinstance(op, Compute)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("model_keys", [GELU, {**LLAMA, "attention": "unfused"}])
@pytest.mark.parametrize("t", [1, 4])
def test_gradients_of_products_cost_what_the_products_do(model_keys: dict[str, Any], t: int) -> None:
    """dX = dY W and dW = dY^T X are permutations of Y = X W^T: the same m n k. So are both gradients of a batched
    product in attention. dgrad of a linear layer follows its forward with n and k exchanged."""
    for part in models.stage_parts(make(*SIZES[1], tp=t, **model_keys), 0):
        for batched in (False, True):
            forward = matmuls(part.forward, "fwd", batched=batched)
            for role in ("dgrad", "wgrad"):
                gradients = matmuls(part.backward, role, batched=batched)
                assert sorted(k.flops for k in gradients) == sorted(k.flops for k in forward)
        linear = matmuls(part.forward, "fwd", batched=False)
        assert [(k.m, k.k, k.n) for k in linear] == [
            (k.m, k.n, k.k) for k in reversed(matmuls(part.backward, "dgrad", batched=False))
        ]


def test_backward_interleaves_gradients_layer_by_layer() -> None:
    """Megatron's order with sequence parallelism: fc2's input gradient after gathering dY, then its weight gradient;
    fc1's saved input is gathered before its input gradient, which is scattered before the weight gradient."""
    layer = models.layer(make(*SIZES[0], tp=2))
    wanted = ("tp.", "mlp.fc1 ", "mlp.fc2 ")
    names = [
        op.name for op in layer.backward if op.name.startswith(wanted) and not op.name.endswith(("bias grad", "add"))
    ]
    assert names[:7] == [
        "tp.all_gather mlp",
        "mlp.fc2 dgrad",
        "mlp.fc2 wgrad",
        "tp.all_gather mlp",
        "mlp.fc1 dgrad",
        "tp.reduce_scatter mlp",
        "mlp.fc1 wgrad",
    ]


@pytest.mark.parametrize("t", [1, 2, 8])
def test_products_of_a_rank(t: int) -> None:
    """Column products have n, row products k split over tp; tokens are never split, not even with sequence
    parallelism."""
    s, b, h, a = SIZES[1]
    work = make(s, b, h, a, tp=t, kv_heads=a // 8, ffn_hidden=3 * h, **LLAMA)
    kv = max(1, a // 8 // t) * (h // a)  # two KV heads on eight ranks are replicated, one to a rank
    products = matmuls(models.layer(work).forward, "fwd", batched=False)
    assert [(k.m, k.n, k.k) for k in products] == [
        (s * b, h // t + 2 * kv, h),
        (s * b, h, h // t),
        (s * b, 2 * 3 * h // t, h),
        (s * b, h, 3 * h // t),
    ]
    (flash,) = (op.kernel for op in models.layer(work).forward if op.name == "attn.flash" and isinstance(op, Compute))
    assert flash == Attention(b, a // t, kv // (h // a), s, s, h // a, dtype="fp16")


@pytest.mark.parametrize("framework", STACKS)
@pytest.mark.parametrize("grad_dtype", ["fp32", "fp16"])
def test_weight_gradients_are_accumulated(framework: Any, grad_dtype: str) -> None:
    """Fused: the product adds to the buffer. Otherwise it writes fp16 and a kernel reads that and the buffer, writes
    the buffer: (2 + 2 g) bytes per weight."""
    work = make(*SIZES[0], framework=framework, grad_dtype=grad_dtype)
    layer = models.layer(work)
    products = matmuls(layer.weight_grad, "wgrad", batched=False)
    adds = [op for op in layer.weight_grad if op.name.endswith("fc1 grad add")]
    if framework == MEGATRON:
        assert all(k.accumulate and k.out_dtype == grad_dtype for k in products)
        assert adds == []
    else:
        assert not any(k.accumulate or k.out_dtype for k in products)
        g, weights = (4 if grad_dtype == "fp32" else 2), products[1].m * products[1].n
        assert traffic(layer.weight_grad, "mlp.fc1 grad add") == ((2 + g) * weights, g * weights)


def test_a_single_micro_batch_needs_no_accumulation_in_autograd() -> None:
    """Autograd keeps the first gradient of a step as it is, where gradients are in working precision."""
    work = make(*SIZES[0], framework=PYTORCH, grad_dtype="fp16", global_batch=1)
    assert not [op for op in models.layer(work, turn=Turn(first=True)).weight_grad if op.name.endswith("grad add")]


def test_fusion_saves_traffic_and_kernels() -> None:
    """With SwiGLU, dropout and flash attention: fewer bytes and kernels from eager to fused, and again to compiled."""
    moved, launched = [], []
    for framework in (PYTORCH, MEGATRON, COMPILED):
        layer = models.layer(make(*SIZES[1], framework=framework, dropout=0.1, **LLAMA))
        kernels = [op.kernel for op in (*layer.forward, *layer.input_grad) if isinstance(op, Compute)]
        moved.append(sum(kernel.bytes for kernel in kernels if isinstance(kernel, Memory)))
        launched.append(len(kernels))
    assert moved == sorted(set(moved), reverse=True)
    assert launched == sorted(launched, reverse=True)


@pytest.mark.parametrize("framework", STACKS)
def test_traffic_of_the_memory_kernels(framework: Any) -> None:
    """Counted by hand for one LayerNorm, GELU, dropout layer of x = 2 s b h bytes and masks of x / 2."""
    s, b, h, a = SIZES[0]
    x, square = 2 * s * b * h, 2 * a * b * s * s
    layer = models.layer(make(s, b, h, a, framework=framework, **GELU))
    assert traffic(layer.forward, "attn.norm") == (x, x)
    assert traffic(layer.forward, "mlp.gelu") == (4 * x, 4 * x)
    assert traffic(layer.backward, "mlp.gelu bwd") == (8 * x, 4 * x)
    assert traffic(layer.backward, "mlp.dropout bwd") == (x + x / 2, x)
    assert traffic(layer.backward, "attn.probs dropout bwd") == (square * 1.5, square)
    if framework == MEGATRON:
        # Branch and residual in, sum and mask out; the causal softmax reads the lower triangle.
        assert traffic(layer.forward, "mlp.residual") == (2 * x, 1.5 * x)
        assert traffic(layer.forward, "attn.softmax") == (square / 2, square)
        assert traffic(layer.backward, "mlp.norm bwd") == (2 * x, x)
    if framework == PYTORCH:
        assert traffic(layer.forward, "mlp.dropout") == (x, 1.5 * x)
        assert traffic(layer.forward, "mlp.residual") == (2 * x, x)
    if framework == COMPILED:
        # The sum is written for the backward pass but not read again by the norm; its gradient takes in the residual's.
        assert traffic(layer.forward, "attn.residual + mlp.norm") == (2 * x, 2.5 * x)
        assert traffic(layer.backward, "mlp.norm bwd + mlp.norm residual grad") == (3 * x, x)
        assert traffic(layer.forward, "attn.softmax + attn.probs dropout") == (square, 2.5 * square)


# --- parameters and state ---

#: The released checkpoints' exact counts: openai/gpt2, gpt2-xl; meta-llama's model.safetensors.index.json.
RELEASED = [
    ("gpt2-124m", 1024, 124_439_808),
    ("gpt2-1.5b", 1024, 1_557_611_200),
    ("llama2-7b", 4096, 6_738_415_616),
    ("llama2-70b", 4096, 68_976_648_192),
    ("llama3-8b", 8192, 8_030_261_248),
    ("llama3-70b", 8192, 70_553_706_496),
    ("llama3-405b", 8192, 405_853_388_800),
]


def preset(name: str, seq: int, **parallelism: Any) -> Workload:
    return load_workload(
        {
            "model": {"preset": name},
            "training": {"seq": seq, "global_batch": 64},
            "parallelism": parallelism,
            "cluster": "dgx_a100",
        }
    )


@pytest.mark.parametrize(("name", "seq", "expected"), RELEASED)
def test_parameter_counts(name: str, seq: int, expected: int) -> None:
    assert models.parameters(preset(name, seq)) == expected


def test_parameters_of_gpt3() -> None:
    """arXiv 2104.04473, equation 2: 12 l h^2 (1 + 13 / 12 h + (V + s) / 12 l h), which leaves out the final norm's 2
    h."""
    work = preset("gpt3-175b", 2048)
    h, layers, v, s = 12288, 96, 51200, 2048
    formula = 12 * layers * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * layers * h))
    assert models.parameters(work) == pytest.approx(formula + 2 * h, rel=1e-12)


@pytest.mark.parametrize("name", ["gpt3-175b", "llama3-8b"])
@pytest.mark.parametrize("t", [1, 2, 8])
def test_ranks_hold_the_model_between_them(name: str, t: int) -> None:
    """Summed over tp, layers are the model's with norms and row biases counted t times; a pipeline holds a tied
    table twice."""
    whole, work = preset(name, 2048, tp=1), preset(name, 2048, tp=t, pp=8)
    h = work.model.hidden
    copies = 2 * h * (2 if work.model.norm == "layernorm" else 1) + (2 * h if work.model.bias else 0)
    layer = elements(models.layer(work).weights)
    assert t * layer == elements(models.layer(whole).weights) + (t - 1) * copies
    stages = [part for stage in range(8) for part in models.stage_parts(work, stage)]
    if t == 1:
        twice = work.model.vocab * h if work.model.tied_embeddings else 0
        assert sum(elements(part.weights) for part in stages) == models.parameters(work) + twice
    assert sum(elements(part.weights) for part in models.stage_parts(whole, 0)) == models.parameters(whole)


@pytest.mark.parametrize(
    ("settings", "per_param"),
    [
        # arXiv 1910.02054, section 3.1: 2 + 2 + (4 + 4 + 4); fp32 gradients make 18; ZeRO-1 over 8 GPUs 2 + 2 + 12/8.
        ({"grad_dtype": "fp16"}, 16),
        ({}, 18),
        ({"grad_dtype": "fp16", "zero": 1, "dp": 8}, 5.5),
        ({"zero": 1, "dp": 8}, 7.5),
        ({"precision": "fp32"}, 16),  # 4 + 4 + 8: no second copy of fp32 weights
        ({"optimizer": {"state_dtype": "bf16", "master_weights": False}}, 10),  # 2 + 4 + 4
    ],
)
def test_bytes_of_state_per_parameter(settings: dict[str, Any], per_param: float) -> None:
    work = make(*SIZES[0], **settings)
    state = models.state_bytes(work, 0)
    assert state.total == per_param * models.parameters(work)


def test_state_of_interleaved_chunks_is_summed() -> None:
    """Pipeline rank 0 of 2 with 2 chunks holds stages 0 and 2: the embedding and two of four layers."""
    work = make(*SIZES[0], pp=2, vpp=2, schedule="interleaved")
    parts = (models.embedding(work), models.layer(work), models.head(work))
    table, layer, head = (elements(part.weights) for part in parts)
    assert models.state_bytes(work, 0).weights == 2 * (table + 2 * layer)
    assert models.state_bytes(work, 1).weights == 2 * (2 * layer + head)


# --- FLOPs ---


@pytest.mark.parametrize(("s", "b", "h", "a"), SIZES)
@pytest.mark.parametrize("layout", [{}, {"tp": 8}, {"tp": 2, "pp": 2, "dp": 2, "sequence_parallel": False}])
def test_flops_against_closed_forms(s: int, b: int, h: int, a: int, layout: dict[str, Any]) -> None:
    """Forward, per layer: 24 B s h^2 of products and 4 B s^2 h of attention; 2 B s h V for the vocabulary; backward
    twice that. arXiv 2104.04473, equation 3 counts the layers' forward once more for full recomputation: 96 B s l h^2
    (1 + s/6h + V/16lh), and arXiv 2205.05198 has 72 B s l h^2 (1 + s/6h + V/12lh) without it."""
    work = make(s, b, h, a, recompute="full", global_batch=8 * b, **GELU, **layout)
    batch, layers, v = 8 * b, 4, work.model.padded_vocab(work.parallelism.tp)
    narayanan = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert models.hardware_flops_per_step(work) == pytest.approx(narayanan, rel=1e-12)
    korthikanti = 72 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert models.model_flops_per_step(work) == pytest.approx(korthikanti, rel=1e-12)
    attention = 3 * batch * layers * 4 * s**2 * h
    assert models.model_flops_per_step(work) - models.model_flops_per_step_causal(work) == pytest.approx(attention / 2)


def test_hardware_flops_of_recomputation_and_flash() -> None:
    """Without recomputation the kernels of unfused attention do the model's FLOPs. Selective recomputation repeats both
    products of attention (4 B s^2 h per layer). Flash does 2 causal products forward and 5 backward: 7/6 of the
    half."""
    s, b, h, a = SIZES[1]

    def hardware(**changes: Any) -> float:
        return models.hardware_flops_per_step(make(s, b, h, a, **{**GELU, **changes}))

    work = make(s, b, h, a, **GELU)
    exact, attention = models.model_flops_per_step(work), 4 * 8 * b * 4.0 * s**2 * h
    assert hardware() == pytest.approx(exact, rel=1e-12)
    assert hardware(recompute="selective") == pytest.approx(exact + attention, rel=1e-12)
    assert hardware(attention="flash") == pytest.approx(exact - 3 * attention + 3.5 * attention / 2, rel=1e-12)


def test_model_flops_of_llama() -> None:
    """SwiGLU has three matrices, grouped KV heads narrow ones: 6 per weight of a product and token, and 12 s h per
    layer."""
    work = preset("llama3-8b", 8192)
    h, f, v, layers, tokens = 4096, 14336, 128256, 32, 64 * 8192
    weights = layers * (h * (h + 2 * 1024) + h * h + 3 * h * f) + h * v
    expected = tokens * (6 * weights + layers * 12 * 8192 * h)
    assert models.model_flops_per_step(work) == pytest.approx(expected, rel=1e-12)


def test_block_recomputation_covers_the_first_layers_of_each_stage() -> None:
    work = make(*SIZES[0], pp=2, recompute={"granularity": "full", "layers": 1}, **GELU)
    for stage in (0, 1):
        layers = [part for part in models.stage_parts(work, stage) if part.name == "layer"]
        assert [bool(layer.recompute) for layer in layers] == [True, False]
    assert [part.name for part in models.stage_parts(work, 0)] == ["embedding", "layer", "layer"]
    assert [part.name for part in models.stage_parts(work, 1)] == ["layer", "layer", "head"]


# --- optimizer ---


def test_optimizer_of_mixed_precision() -> None:
    """fp16 with fp32 gradients, per parameter: unscale 4 + 4, norm 4, clip 4 + 4, Adam 16 read and 12 written, cast 4 +
    2, clearing the gradients 4. The two decisions are one number over the model-parallel ranks."""
    n = 10**6
    ops = models.optimizer_ops(make(*SIZES[0], tp=2, pp=2, grad_clip=1.0), vector(n))
    moved = {op.name.removeprefix("optimizer."): op.kernel.bytes / n for op in ops if isinstance(op, Compute)}
    assert moved == {
        "unscale": 8,
        "grad norm": 4,
        "clip": 8,
        "adam": 28,
        "master to model weights": 6,
        "zero gradients": 4,
    }
    assert [(op.op, op.axis, op.nbytes) for op in ops if isinstance(op, Comm)] == [("all_reduce", "mp", 4.0)] * 2
    assert {op.phase for op in ops if isinstance(op, Compute)} == {"O"}


def test_zero_one_divides_the_optimizer_among_replicas() -> None:
    """Each of 4 replicas updates a quarter; clearing the gradient buffer is not divided. The decisions span dp too."""
    n = 10**6
    one: dict[str, Any] = {"precision": "bf16", "grad_clip": 1.0, "tp": 2}
    whole = models.optimizer_ops(make(*SIZES[0], dp=4, **one), vector(n))
    shard = models.optimizer_ops(make(*SIZES[0], dp=4, zero=1, **one), vector(n))
    for a, b in zip(*([op for op in ops if isinstance(op, Compute)] for ops in (whole, shard)), strict=True):
        share = 1 if a.name == "optimizer.zero gradients" else 4
        assert a.kernel.bytes == share * b.kernel.bytes
    assert [op.axis for op in shard if isinstance(op, Comm)] == ["mp", "dp"]


def test_eager_adam_moves_more() -> None:
    """PyTorch's foreach AdamW walks over its tensors eight times: 12 operands read and 8 written after the decay's one
    each of 4 bytes, against 4 and 3 of the fused kernel."""
    fused, eager = (
        [
            op
            for op in models.optimizer_ops(make(*SIZES[0], optimizer={"implementation": i}), vector(1000))
            if isinstance(op, Compute)
        ]
        for i in ("fused", "foreach")
    )
    adam = {op.name: op.kernel.bytes for op in fused}["optimizer.adam"]
    steps = [op for op in eager if op.kernel.kind == "foreach" and op.name != "optimizer.unscale"]
    assert len(steps) == 8
    assert adam == 4 * 1000 * (4 + 3)
    assert sum(op.kernel.bytes for op in steps) == 4 * 1000 * (13 + 8)


def test_gradients_of_replicated_parameters() -> None:
    """With sequence parallelism each rank's norms (4 h) and row biases (2 h) saw its rows alone: 6 h per layer, 2 h in
    the head. Without, the ranks' gradients agree. Two KV heads on eight ranks: each rank's has part of its query
    heads."""
    s, b, h, a = SIZES[1]
    for sequence_parallel, params in ((True, 4 * 6 * h + 2 * h), (False, 0)):
        work = make(s, b, h, a, tp=2, sequence_parallel=sequence_parallel)
        weights = models.weights_of(models.stage_parts(work, 0))
        assert sum(c.nbytes for c in models.replicated_gradient_ops(work, weights)) == 4 * params
    shared = make(s, b, h, a, tp=8, kv_heads=2, sequence_parallel=False, bias=False)
    (op,) = models.replicated_gradient_ops(shared, models.layer(shared).weights)
    assert op.nbytes == 4 * 2 * (h // a) * h


def test_recompute_by_op_keeps_attention_and_every_second_product() -> None:
    """Per token and in 2 bytes: the layer's input, q, v, the context, gate and down, 4 h + kv + ffn wide together, and
    4 bytes of log-sum-exp per head; k, the product after attention and up run again, as does what is no product."""
    sizes = {"layers": 2, "hidden": 1024, "heads": 16, "kv_heads": 4, "ffn_hidden": 4096, "vocab": 32_000}
    llama = {"activation": "swiglu", "norm": "rmsnorm", "position": "rope", "bias": False}
    job = {
        "name": "tiny",
        "model": sizes | llama,
        "training": {"seq": 512, "global_batch": 1, "recompute": "ops"},
        "cluster": "dgx_h100",
    }
    part = models.layer(load_workload(job))
    assert part.saved_bytes == 512 * (2 * (4 * 1024 + 256 + 4096) + 4 * 16)
    again = [op for op in part.recompute if isinstance(op, Compute)]
    products = {op.name: op.kernel.n for op in again if isinstance(op.kernel, Matmul)}
    assert products == {"attn.qkv": 256, "attn.proj": 1024, "mlp.fc1": 4096}
    assert not any(isinstance(op.kernel, Attention) for op in again)
    assert all(op.phase == "R" for op in again)


def _by_op(**keys: Any) -> models.Part:
    sizes = {"layers": 2, "hidden": 1024, "heads": 16, "ffn_hidden": 4096, "vocab": 32_000}
    llama = {"activation": "swiglu", "norm": "rmsnorm", "position": "rope", "bias": False}
    job = {
        "name": "tiny",
        "model": sizes | llama | keys.pop("model", {}),
        "training": {"seq": 512, "global_batch": 8, "recompute": "ops"} | keys.pop("training", {}),
        "framework": keys.pop("framework", MEGATRON),
        "parallelism": keys.pop("parallelism", {}),
        "cluster": "dgx_h100",
    }
    return models.layer(load_workload(job))


LATENT = {"q_lora_rank": 384, "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64}
MIXTURE = {"experts": 8, "top_k": 2, "ffn_hidden": 1024, "shared_experts": 1}


def test_recompute_by_op_counts_products_of_latent_attention_and_shared_experts() -> None:
    """In torchtitan's order: q down (kept), q up, kv down (kept), kv up, out (kept), shared gate, shared up (kept),
    shared down. The router's product is not counted; it, grouped products and the copies of tokens run again."""
    part = _by_op(model={"mla": LATENT, "moe": MIXTURE})
    again = [op for op in part.recompute if isinstance(op, Compute)]
    products = {op.name: op.kernel.n for op in again if isinstance(op.kernel, Matmul)}
    assert products == {
        "attn.q_up": 16 * 64,
        "attn.kv_up": 16 * (32 + 64),
        "moe.router": 8,
        "shared.fc1": 1024,
        "shared.fc2": 1024,
    }
    assert {op.name for op in again if isinstance(op.kernel, GroupedMatmul)} == {"moe.fc1", "moe.fc2"}
    # Input, q down, kv down with the keys' rotary part, context, out, shared up; 4 bytes of log-sum-exp per head.
    width = 1024 + 384 + (128 + 32) + 16 * 64 + 1024 + 1024
    assert part.saved_bytes == 512 * (2 * width + 4 * 16)


def test_recompute_by_op_keeps_what_came_from_other_ranks() -> None:
    """Of dispatch and combine (ep 4) what was received is kept, 2 copies of every token each, of tensor parallelism's
    sums the rank's rows; gathered rows are gathered again."""
    part = _by_op(model={"moe": MIXTURE}, parallelism={"dp": 4, "ep": 4})
    whole = _by_op(model={"moe": MIXTURE}, parallelism={"dp": 4})
    assert part.saved_bytes - whole.saved_bytes == 2 * 512 * 2 * 1024 * 2
    assert not [op for op in part.recompute if isinstance(op, Comm) and op.op == "all_to_all"]
    split = _by_op(parallelism={"tp": 2, "sequence_parallel": True})
    kept = {tensor.name: tensor.nbytes for tensor in split.saved}
    assert kept["tp.reduce_scatter attn out"] == kept["tp.reduce_scatter mlp out"] == 512 / 2 * 1024 * 2
    assert [op.op for op in split.recompute if isinstance(op, Comm)] == ["all_gather", "all_gather"]


def test_recompute_by_op_gathers_nothing_for_a_product_that_is_kept() -> None:
    """Of a GPT the first product of the MLP is the fifth, and kept: its input is gathered again neither by itself nor,
    with ``overlap.tp``, in a ring beside it."""
    gpt = {"activation": "gelu", "position": "learned"}
    for overlapped in (False, True):
        layout = {"tp": 2, "sequence_parallel": True, "overlap": {"tp": overlapped}}
        part = _by_op(model=gpt, parallelism=layout)
        names = {op.name for op in part.recompute if not isinstance(op, Beside)}
        beside = {kernel.name for op in part.recompute if isinstance(op, Beside) for kernel in op.kernels}
        assert not {"tp.all_gather mlp", "mlp.fc1"} & (names | beside)


def test_recompute_by_op_of_other_attention() -> None:
    """Batched products are not ``aten.mm``: unfused attention runs again whole; fused attention never does, in a ring
    of ranks neither."""
    unfused = _by_op(model={"attention": "unfused"})
    assert {"attn.scores", "attn.context"} <= {op.name for op in unfused.recompute if isinstance(op, Compute)}
    ring = _by_op(parallelism={"cp": 2, "cp_method": "ring"})
    assert not [op for op in ring.recompute if isinstance(op, Beside) or getattr(op, "axis", "") == "cp"]
    ulysses = _by_op(parallelism={"cp": 2, "cp_method": "ulysses"})
    assert not [op for op in ulysses.recompute if isinstance(op, Compute) and isinstance(op.kernel, Attention)]
    assert {"cp.all_to_all q out", "cp.all_to_all context out"} <= {tensor.name for tensor in ulysses.saved}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"model": {"attention": "unfused", "kv_heads": 4}},
        {"model": {"mla": LATENT, "moe": MIXTURE}},
        {"model": {"moe": MIXTURE}, "parallelism": {"dp": 4, "ep": 4}},
        {"parallelism": {"tp": 4, "sequence_parallel": True, "overlap": {"tp": True}}},
        {"framework": PYTORCH},
    ],
)
def test_recompute_by_op_makes_what_it_does_not_keep(keys: dict[str, Any]) -> None:
    """Between keeping all and recomputing all: it keeps less than the first and more than the second, and what it keeps
    and makes again covers what the backward pass reads, tensor by tensor."""
    layer = _by_op(**keys)
    training = dict(keys.get("training", {}))
    none, full = (_by_op(**{**keys, "training": {**training, "recompute": how}}) for how in ("none", "full"))
    assert full.saved_bytes < layer.saved_bytes < none.saved_bytes
    here: Counter[str] = Counter()
    for tensor in (*layer.saved, *layer.recomputed):
        here[tensor.name] += int(tensor.nbytes)
    assert all(here[tensor.name] >= tensor.nbytes for tensor in none.saved)
    assert 0 < len(layer.recompute) < len(none.forward)

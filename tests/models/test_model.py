"""Kernels, activations, communication, parameters and FLOPs of a transformer, against the papers' closed forms."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from simulator import models
from simulator.program import Compute
from tests.support.frameworks import COMPILED, MEGATRON, PYTORCH, STACKS
from tests.support.grids import every_pair
from tests.support.layers import GELU, LLAMA, SIZES, make


def flops(ops: Iterable[object]) -> float:
    return sum(op.kernel.flops for op in ops if isinstance(op, Compute))


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

"""Windows and Gemma 3 under Hugging Face: kernels counted by hand from transformers' source, and a real step's."""

from __future__ import annotations

from typing import Any

import pytest

from simulator import models
from simulator.errors import InputError
from simulator.models.vocabulary import embedding
from simulator.program import Attention, Compute
from tests.support.exact import compare
from tests.support.hugging_face import FIRST, HUGGING_FACE, LLAMA, kinds, load

WINDOW = LLAMA | {"sliding_window": 4}
GEMMA: dict[str, Any] = LLAMA | {
    "layers": 2,
    "sliding_window": 4,
    "mixers": ["window", "attention"],
    "activation": "geglu",
    "norm_place": "both",
    "qk_norm": True,
}


def attention(model: dict[str, Any], number: int) -> Attention:
    """Return the attention of a layer's forward pass."""
    part = models.layer(load(model), turn=FIRST, number=number)
    (kernel,) = (op.kernel for op in part.forward if isinstance(op, Compute) and isinstance(op.kernel, Attention))
    return kernel


def test_a_window_is_a_bias_of_all_scores() -> None:
    """Nothing is skipped: every query meets every key. Without a window half of them, and heads share keys."""
    masked, plain = attention(WINDOW, 0), attention(LLAMA, 0)
    assert (masked.bias, masked.causal, masked.window, masked.kv_heads) == (True, False, 0, masked.heads)
    assert masked.pairs == masked.q_len * masked.kv_len
    assert (plain.bias, plain.causal) == (False, True)
    assert plain.kv_heads < plain.heads


def test_a_window_as_long_as_a_sequence_is_a_mask_too() -> None:
    """transformers leaves out the mask where keys are fewer than the window (``_ignore_causal_mask_sdpa``)."""
    longest = load(LLAMA).training.seq
    assert attention(LLAMA | {"sliding_window": longest}, 0) == attention(WINDOW, 0)
    assert attention(LLAMA | {"sliding_window": longest + 1}, 0) == attention(LLAMA, 0)


def test_kernels_of_a_layer_with_a_window() -> None:
    """Beside a layer's own: copies of keys and of values to all heads, and the mask as a bias; back two sums."""
    plain, masked = (models.layer(load(model), turn=FIRST) for model in (LLAMA, WINDOW))
    assert kinds(masked.forward) - kinds(plain.forward) == {"memory": 3}
    assert kinds(masked.backward) - kinds(plain.backward) == {"memory": 2}


def test_a_mask_is_made_once_for_all_layers() -> None:
    """Four kernels, whichever layers have the window."""
    plain, first, second = (
        [op.name for op in embedding(load(LLAMA | mixers)).forward if isinstance(op, Compute)]
        for mixers in ({}, *({"sliding_window": 4, "mixers": kinds} for kinds in (["window"], ["attention", "window"])))
    )
    assert [name for name in first if name not in plain] == [
        "mask.causal",
        "mask.both",
        "mask.window",
        "mask.with causal",
    ]
    assert first == second


def test_layers_of_gemma_alternate() -> None:
    assert [attention(GEMMA, number).bias for number in (0, 1)] == [True, False]


def test_kernels_of_gemmas_norms() -> None:
    """Forward six as Llama's (to fp32, square, mean, quotient, weight, to bf16), and two over the weight alone: to
    fp32, plus one. Backward eleven for the input, two for the weight, and its cast. The layer has four norms and those
    of queries and keys; Llama with these has two fewer.
    """
    llama, gemma = (models.layer(load(model), turn=FIRST, number=1) for model in (LLAMA | {"qk_norm": True}, GEMMA))
    assert kinds(gemma.forward) - kinds(llama.forward) == {"memory": 2 * 8 + 4 * 2}
    assert kinds(gemma.backward) - kinds(llama.backward) == {"memory": 2 * 14 + 4 * 1}


def test_a_norm_behind_a_block_runs_the_last_product_again() -> None:
    """Under gradient checkpointing Llama's layer ends before its last product, which nothing reads. Gemma's last norm
    does."""
    full = {"training": {"recompute": "full"}}
    again = [
        [op.name for op in models.layer(load(model, **full), turn=FIRST, number=1).recompute if isinstance(op, Compute)]
        for model in (LLAMA, GEMMA)
    ]
    ends = [[name for name in names if name in ("mlp.fc2", "mlp.post_norm.cast")] for names in again]
    assert ends == [[], ["mlp.fc2", "mlp.post_norm.cast"]]


@pytest.mark.parametrize(
    ("model", "sections", "key"),
    [
        (LLAMA | {"norm_place": "both"}, {}, "model.norm_place"),
        (GEMMA | {"norm_place": "after"}, {}, "model.norm_place"),
        (GEMMA | {"mixers": ["window", "chunked"], "attention_chunk": 4}, {}, "model.mixers"),
        (GEMMA, {"framework": {"name": HUGGING_FACE, "compile": True}}, "model.activation"),
        (GEMMA, {"training": {"optimizer": {"master_weights": True}}}, "model.activation"),
    ],
)
def test_what_is_not_gemma_is_refused(model: dict[str, Any], sections: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError) as caught:
        load(model, **sections)
    assert caught.value.key == key


def test_shortcuts_change_nothing() -> None:
    compare({"dp": 2}, framework=HUGGING_FACE, model=GEMMA, cluster="hgx_h200_8gpu")

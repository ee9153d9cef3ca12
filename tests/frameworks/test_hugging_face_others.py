"""OLMo 2, StarCoder 2 and Phi-3 of transformers: kernels of a layer counted by hand from their source."""

from __future__ import annotations

from typing import Any

import pytest

from simulator import models
from simulator.errors import InputError
from simulator.operations.nodes import Tensor
from tests.support.hugging_face import FIRST, HEAD_DIM, HEADS, KV_HEADS, LLAMA, TOKENS, kinds, load, memory_kernels

OLMO2 = LLAMA | {"norm_place": "after", "qk_norm": True, "qk_norm_kind": "width"}
STARCODER2 = LLAMA | {"norm": "layernorm", "activation": "gelu", "bias": True}
PHI3 = LLAMA | {"joined_products": True}


def test_kernels_of_an_olmo2_layer() -> None:
    """Seven products. Forward there are four norms, on attention, MLP, queries and keys. Each has 6: to fp32, square,
    mean, quotient, weight, to bf16. Queries and keys turn by tables in fp32, which takes a cast more: 6 each. Then
    there are SiLU, the product with up, and two sums: 24 + 12 + 2 + 2 = 40.

    Backward a norm has 11 for its input and 3 for its weight, whose sum is cast. Two sums go round the blocks. To turn
    back takes 10 as in Llama, and 3 casts more. The MLP has 3. Gradients of one input are added: q, k and v twice, gate
    and up once. All are 4 * 14 + 2 + 2 * 13 + 3 + 3 = 90.
    """
    part = models.layer(load(OLMO2), turn=FIRST)
    assert kinds(part.forward) == {"product": 7, "attention": 1, "memory": 40}
    assert kinds(part.backward) == {"product": 14, "attention": 1, "memory": 90}


def test_kernels_of_a_starcoder2_layer() -> None:
    """Six products (q, k, v, o, two of the MLP), which add their biases. Forward, of the others: two LayerNorms, 5 each
    for q and k to turn, GELU, two sums: 2 + 10 + 1 + 2 = 15.

    Backward a LayerNorm has two kernels, and the sum round the block: 6. To turn back takes 10 each, GELU 1, and the
    sums of gradients of q, k and v 2. Six biases are sums of rows. All are 6 + 20 + 1 + 2 + 6 = 35.
    """
    part = models.layer(load(STARCODER2), turn=FIRST)
    assert kinds(part.forward) == {"product": 6, "attention": 1, "memory": 15}
    assert kinds(part.backward) == {"product": 12, "attention": 1, "memory": 35}
    assert memory_kernels(part, "F")["mlp.gelu"].op == "activation"  # by a tangent, which memory bounds


def test_kernels_of_a_phi3_layer() -> None:
    """Four products. Forward, of the others: two norms of 6; q and k turn by 5 and are joined with a part that stays;
    SiLU and the product with up; the context's copy; two sums: 12 + 12 + 2 + 1 + 2 = 29.

    Backward a norm has 14 (`test_kernels_of_a_llama_layer`). To turn back takes 10, and zeros and a sum for the part
    that stays: 12 each. Gradients of q, k and v are put into zeros (6) and added (2). The MLP has 3 and a join.
    28 + 24 + 8 + 4 = 64.
    """
    part = models.layer(load(PHI3), turn=FIRST)
    assert kinds(part.forward) == {"product": 4, "attention": 1, "memory": 29}
    assert kinds(part.backward) == {"product": 8, "attention": 1, "memory": 64}


def test_phi3_keeps_the_whole_product_and_the_context_twice() -> None:
    """Values are a view, which keeps queries and keys that were not turned alive. Attention keeps the context by head,
    and the next product by token."""
    kept, plain = ({tensor.name: tensor for tensor in models.layer(load(model)).saved} for model in (PHI3, LLAMA))
    head = 2 * TOKENS * HEAD_DIM  # bytes of a head of all tokens
    assert kept["attn.context by head"] == Tensor("attn.context by head", head * HEADS)
    assert kept["attn.v"].nbytes - plain["attn.v"].nbytes == head * (HEADS + KV_HEADS)


@pytest.mark.parametrize(
    ("model", "sections", "key"),
    [
        (OLMO2 | {"qk_norm_kind": "head"}, {}, "model.qk_norm_kind"),
        (LLAMA | {"qk_norm": True, "qk_norm_kind": "width"}, {}, "model.qk_norm_kind"),
        (STARCODER2 | {"norm": "rmsnorm"}, {}, "model.norm"),
        (STARCODER2 | {"norm_place": "both"}, {}, "model.norm_place"),
        (PHI3 | {"qk_norm": True}, {}, "model.joined_products"),
        (PHI3 | {"attention": "unfused"}, {}, "model.attention"),
        (PHI3, {"framework": "torchtitan"}, "model.joined_products"),
        (OLMO2, {"training": {"optimizer": {"master_weights": True}}}, "model.norm_place"),
        (STARCODER2, {"framework": {"name": "hugging_face", "compile": True}}, "model.activation"),
    ],
)
def test_what_was_not_looked_at_is_refused(model: dict[str, Any], sections: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError) as caught:
        load(model, **sections)
    assert key in str(caught.value)

"""Names of weights, as Megatron-LM and Hugging Face's models have them, from the names of kernels."""

from __future__ import annotations

#: Kernel or block of kernels -> the module that has its weights.
MODULES = {
    "attn": "attention",
    "moe.router": "mlp.router",
    "moe": "mlp.experts",
    "shared": "mlp.shared_experts",
    "head.norm": "final_norm",
    "head.logits": "output_layer",
}
#: The embedding tables of words and of learned positions.
WORDS, POSITIONS = "embedding.word_embeddings.weight", "embedding.position_embeddings.weight"
#: The projection to the vocabulary, and its bias.
OUTPUT, OUTPUT_BIAS = "output_layer.weight", "output_layer.bias"


def weight_name(kernel: str, tensor: str = "weight") -> str:
    """Return the name of the ``tensor`` (weight or bias) that ``kernel`` reads, within its part of the model.

    >>> [weight_name("attn.qkv", "bias"), weight_name("mtp.hidden norm"), weight_name("head.logits")]
    ['attention.qkv.bias', 'mtp.hidden_norm.weight', 'output_layer.weight']
    """
    block, _, rest = kernel.partition(".")
    module = MODULES.get(kernel) or f"{MODULES.get(block, block)}.{rest}"
    return f"{module.replace(' ', '_')}.{tensor}"

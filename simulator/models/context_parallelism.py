"""Context parallelism: attention across ranks, with a part of every sequence on each.

Everything else in a layer works token by token, so that a rank does it for its own tokens alone.
"""

from __future__ import annotations

from dataclasses import replace

from simulator.models.attention import flash_kernel, flash_saved, whole_attention
from simulator.models.shapes import FrameworkShapes
from simulator.operations.nodes import Node, Op, Ops, memory
from simulator.program import AllToAll, Attention, Axis, Beside, Collective, CollectiveKind, Compute, Purpose, StepPhase


def core_attention(shapes: FrameworkShapes) -> tuple[Node, ...]:
    """Return the operations from queries, keys and values to the context.

    Selective recomputation runs these again (arXiv 2205.05198, section 5).
    """
    if shapes.cp == 1:
        return whole_attention(shapes, context="attn.context")
    return (_ring(shapes),) if shapes.cp_method == "ring" else _ulysses(shapes)


def _ring_exchange(what: str, nbytes: float) -> Collective:
    return Collective(f"cp.send_recv {what}", CollectiveKind.SEND_RECV, float(nbytes), Axis.CP, Purpose.CONTEXT)


def ring_kernels(shapes: FrameworkShapes) -> list[Attention | None]:
    """Return the attention kernel of each of a ring's cp steps, or None where the causal mask leaves nothing.

    A rank begins with its own keys, then come those of the rank before it, and so on.

    ``contiguous``: rank r has the r-th part of a sequence. It attends to all keys of the r ranks before it and to none
    of those after it. The last rank does (2 cp - 1) / cp times the mean.

    ``zigzag``: rank r has chunks r and 2 cp - 1 - r of 2 cp. In every step after the first, half of the pairs of
    queries and keys remain. With keys of a rank before it, all its queries attend to the earlier chunk. With keys of a
    rank after it, the later half of its queries attend to both chunks (Megatron-LM and TransformerEngine,
    ``AttnFuncWithCPAndKVP2P``). The first kind has shorter rows and is slower by a few percent. The last rank of the
    ring has that kind alone, and the others wait for it in every layer. So every step is priced as the first kind.
    """
    part = shapes.seq // shapes.cp
    local = flash_kernel(shapes, part)
    if shapes.cp_layout == "zigzag":
        return [local, *[replace(local, kv_len=part // 2, causal=False)] * (shapes.cp - 1)]
    return [local, *[replace(local, causal=False) if step <= shapes.cp_rank else None for step in range(1, shapes.cp)]]


def _ring(shapes: FrameworkShapes) -> Node:
    """Return ring attention (arXiv 2310.01889) as TransformerEngine runs it.

    Keys and values go round in cp - 1 exchanges. Beside each the rank attends to those at hand, and merges the result
    into the context by its log-sum-exp.

    In the backward pass they go round again, and their gradients follow one step behind. Of these cp exchanges the
    first has keys and values only and the last gradients only. A rank thus sends (cp - 1) times its keys and values
    forward, and twice that backward.

    The ring needs more than flash attention alone. Forward there are two buffers of keys and values, and a partial
    context. Backward there are two of keys, values and their gradients, and partial gradients of all.
    """
    kv = float(shapes.element * shapes.tokens * (shapes.kv_width + shapes.v_width))
    q, context = (float(shapes.element * shapes.tokens * width) for width in (shapes.q_width, shapes.context_width))
    kernels = ring_kernels(shapes)
    forward: list[Op] = []
    backward: list[Op] = []
    for step, kernel in enumerate(kernels):
        work: list[Compute] = []
        work_back: list[Compute] = []
        received: list[Compute] = []
        if kernel is not None:
            work.append(Compute("attn.flash", kernel, StepPhase.FORWARD))
            work_back.append(Compute("attn.flash bwd", replace(kernel, backward=True), StepPhase.BACKWARD))
            if step:
                work.append(memory("F", "attn.ring merge", "residual", 2 * context, context, shapes.dtype))
                work_back.append(memory("B", "attn.ring dq sum", "residual", 2 * q, q, shapes.dtype))
                part = kv * kernel.kv_len / kernels[0].kv_len if kernels[0] else kv
                received.append(memory("B", "attn.ring dkv sum", "residual", 2 * part, part, shapes.dtype))
        ends = step in (0, shapes.cp - 1)
        forward += _exchange_beside(_ring_exchange("kv", kv) if step < shapes.cp - 1 else None, work)
        backward += _exchange_beside(_ring_exchange("dkv" if step else "kv", kv if ends else 2 * kv), work_back)
        backward += received
    return Node(
        forward=tuple(forward),
        input_grad=tuple(backward),
        saved=flash_saved(shapes, "attn.context"),
        forward_bytes=2 * kv + context,
        # Gradients of the context and of queries, whole and partial; two buffers of kv and dkv, and a partial dkv.
        grad_bytes=context + 2 * q + 5 * kv,
    )


def _exchange_beside(comm: Collective | None, kernels: list[Compute]) -> Ops:
    """Return one step of a ring: an exchange beside ``kernels``, of which either may be missing."""
    if comm is None:
        return tuple(kernels)
    return (Beside(comm, tuple(kernels)),) if kernels else (comm,)


def _ulysses(shapes: FrameworkShapes) -> tuple[Node, ...]:
    """Return the attention of DeepSpeed-Ulysses (arXiv 2309.14509).

    An all-to-all each of queries, keys and values gives every rank whole sequences of 1/cp of the heads. Another gives
    it back the context of its own tokens. Gradients travel the same ways back. Of each a rank sends (cp - 1) / cp.
    Every all-to-all is packed and unpacked by a copy.

    Where there are fewer KV heads than ranks each is sent to several, and their gradients are summed.
    """
    spread = max(shapes.kv_heads, shapes.cp)
    q, context, narrow = (
        float(shapes.element * shapes.tokens * width)
        for width in (shapes.q_width, shapes.context_width, shapes.kv_width)
    )
    k, v = (float(shapes.element * shapes.tokens * spread * width) for width in (shapes.head_dim, shapes.v_head_dim))
    whole = replace(
        shapes, cp=1, tokens=shapes.tokens * shapes.cp, heads=shapes.heads // shapes.cp, kv_heads=spread // shapes.cp
    )
    repeat = Node()
    if spread > shapes.kv_heads:
        repeat = Node(
            forward=tuple(memory("F", f"attn.repeat {x}", "copy", narrow, k, shapes.dtype) for x in "kv"),
            input_grad=tuple(memory("B", f"attn.repeat {x} bwd", "reduce", k, narrow, shapes.dtype) for x in "kv"),
            forward_bytes=2 * k,
            grad_bytes=2 * (narrow + k),
        )
    apart = Node(
        forward=tuple(op for x, size in (("q", q), ("k", k), ("v", v)) for op in _all_to_all(shapes, "F", x, size)),
        input_grad=tuple(
            op for x, size in (("v", v), ("k", k), ("q", q)) for op in _all_to_all(shapes, "B", f"d{x}", size)
        ),
        forward_bytes=2 * (q + k + v),
        grad_bytes=2 * (q + k + v),
    )
    back = Node(
        forward=_all_to_all(shapes, "F", "context", context),
        input_grad=_all_to_all(shapes, "B", "dcontext", context),
        forward_bytes=2 * context,
        grad_bytes=2 * context,
    )
    return (repeat, apart, *whole_attention(whole, context="attn.context of own heads"), back)


def _all_to_all(shapes: FrameworkShapes, phase: str, what: str, nbytes: float) -> Ops:
    """Return an all-to-all of ``nbytes`` over the ranks of a sequence, with the copies before and after it."""

    def copy(name: str) -> Compute:
        return memory(phase, f"attn.{name} {what}", "copy", nbytes, nbytes, shapes.dtype)

    exchange = AllToAll(f"cp.all_to_all {what}", float(nbytes), Axis.CP, Purpose.CONTEXT)
    return (copy("pack"), exchange, copy("unpack"))

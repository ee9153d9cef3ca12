"""Context parallelism: attention of ranks that each have a part of every sequence.

Everything else in a layer works token by token, so that a rank does it for its own tokens alone.
"""

from __future__ import annotations

from dataclasses import replace

from simulator.models.attention import flash_kernel, flash_saved, whole_attention
from simulator.models.shapes import FrameworkShapes
from simulator.operations.nodes import Node, Op, Ops, memory
from simulator.program import AllToAll, Attention, Axis, Beside, Collective, CollectiveKind, Compute, Purpose, StepPhase


def core_attention(z: FrameworkShapes) -> tuple[Node, ...]:
    """From queries, keys and values to the context: what selective recomputation runs again (2205.05198, section 5)."""
    if z.cp == 1:
        return whole_attention(z, context="attn.context")
    return (_ring(z),) if z.cp_method == "ring" else _ulysses(z)


def _ring_exchange(what: str, nbytes: float) -> Collective:
    return Collective(f"cp.send_recv {what}", CollectiveKind.SEND_RECV, float(nbytes), Axis.CP, Purpose.CONTEXT)


def ring_kernels(z: FrameworkShapes) -> list[Attention | None]:
    """The attention kernel of each of a ring's cp steps: own keys first, then those of the rank before, and so on; None
    where the causal mask leaves nothing.

    ``contiguous``: rank r has the r-th part of a sequence, so that it attends to all keys of the r ranks before it and
    to none of those after it. The last rank does (2 cp - 1) / cp times the mean.
    ``zigzag``: rank r has chunks r and 2 cp - 1 - r of 2 cp, and every step after the first has 1/2 of the pairs of its
    queries and those keys: all queries with the earlier chunk of a rank before it, the later half of its queries with
    both chunks of a rank after it (Megatron-LM and TransformerEngine, ``AttnFuncWithCPAndKVP2P``). The first kind, with
    its shorter rows, is the slower by a few percent; the last rank of the ring has no other, and the others, which
    exchange with it in every layer, wait for it, so that all are priced so.
    """
    part = z.seq // z.cp
    own = flash_kernel(z, part)
    if z.cp_layout == "zigzag":
        return [own, *[replace(own, kv_len=part // 2, causal=False)] * (z.cp - 1)]
    return [own, *[replace(own, causal=False) if step <= z.cp_rank else None for step in range(1, z.cp)]]


def _ring(z: FrameworkShapes) -> Node:
    """Ring attention (arXiv 2310.01889) as TransformerEngine runs it: keys and values go round in cp - 1 exchanges,
    each beside the attention to those at hand, whose result is merged into the context by its log-sum-exp.

    Backward they go round again, and their gradients with them, one step behind: cp exchanges, of which the first has
    keys and values only and the last gradients only. A rank thus sends (cp - 1) times its keys and values forward, and
    twice that backward.
    Beside what flash attention keeps and needs there are two buffers of keys and values and a partial context; backward
    two of keys, values and their gradients, and partial gradients of all.
    """
    kv = float(z.element * z.tokens * (z.kv_width + z.v_width))
    q, context = (float(z.element * z.tokens * width) for width in (z.q_width, z.context_width))
    kernels = ring_kernels(z)
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
                work.append(memory("F", "attn.ring merge", "residual", 2 * context, context, z.dtype))
                work_back.append(memory("B", "attn.ring dq sum", "residual", 2 * q, q, z.dtype))
                part = kv * kernel.kv_len / kernels[0].kv_len if kernels[0] else kv
                received.append(memory("B", "attn.ring dkv sum", "residual", 2 * part, part, z.dtype))
        ends = step in (0, z.cp - 1)
        forward += _exchange_beside(_ring_exchange("kv", kv) if step < z.cp - 1 else None, work)
        backward += _exchange_beside(_ring_exchange("dkv" if step else "kv", kv if ends else 2 * kv), work_back)
        backward += received
    return Node(
        forward=tuple(forward),
        input_grad=tuple(backward),
        saved=flash_saved(z, "attn.context"),
        forward_bytes=2 * kv + context,
        # Gradients of the context and of queries, whole and partial; two buffers of kv and dkv, and a partial dkv.
        grad_bytes=context + 2 * q + 5 * kv,
    )


def _exchange_beside(comm: Collective | None, kernels: list[Compute]) -> Ops:
    """One step of a ring: either may have nothing to do."""
    if comm is None:
        return tuple(kernels)
    return (Beside(comm, tuple(kernels)),) if kernels else (comm,)


def _ulysses(z: FrameworkShapes) -> tuple[Node, ...]:
    """DeepSpeed-Ulysses (arXiv 2309.14509): an all-to-all each of queries, keys and values gives every rank whole
    sequences of 1/cp of the heads, another gives it back the context of its own tokens; their gradients travel the same
    ways back. Of each a rank sends (cp - 1) / cp. Every all-to-all is packed and unpacked by a copy.

    Where there are fewer KV heads than ranks each is sent to several, and their gradients are summed.
    """
    spread = max(z.kv_heads, z.cp)
    q, context, narrow = (float(z.element * z.tokens * width) for width in (z.q_width, z.context_width, z.kv_width))
    k, v = (float(z.element * z.tokens * spread * width) for width in (z.head_dim, z.v_head_dim))
    whole = replace(z, cp=1, tokens=z.tokens * z.cp, heads=z.heads // z.cp, kv_heads=spread // z.cp)
    repeat = Node()
    if spread > z.kv_heads:
        repeat = Node(
            forward=tuple(memory("F", f"attn.repeat {x}", "copy", narrow, k, z.dtype) for x in "kv"),
            input_grad=tuple(memory("B", f"attn.repeat {x} bwd", "reduce", k, narrow, z.dtype) for x in "kv"),
            forward_bytes=2 * k,
            grad_bytes=2 * (narrow + k),
        )
    apart = Node(
        forward=tuple(op for x, size in (("q", q), ("k", k), ("v", v)) for op in _all_to_all(z, "F", x, size)),
        input_grad=tuple(op for x, size in (("v", v), ("k", k), ("q", q)) for op in _all_to_all(z, "B", f"d{x}", size)),
        forward_bytes=2 * (q + k + v),
        grad_bytes=2 * (q + k + v),
    )
    back = Node(
        forward=_all_to_all(z, "F", "context", context),
        input_grad=_all_to_all(z, "B", "dcontext", context),
        forward_bytes=2 * context,
        grad_bytes=2 * context,
    )
    return (repeat, apart, *whole_attention(whole, context="attn.context of own heads"), back)


def _all_to_all(z: FrameworkShapes, phase: str, what: str, nbytes: float) -> Ops:
    def copy(name: str) -> Compute:
        return memory(phase, f"attn.{name} {what}", "copy", nbytes, nbytes, z.dtype)

    exchange = AllToAll(f"cp.all_to_all {what}", float(nbytes), Axis.CP, Purpose.CONTEXT)
    return (copy("pack"), exchange, copy("unpack"))

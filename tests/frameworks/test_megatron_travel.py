"""Kernels around the travel of tokens in Megatron-Core: HybridEP's, DeepEP's, and Transformer Engine's maps of rows."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.config import load_workload
from simulator.models import stage_parts
from simulator.models.parts import Part
from simulator.operations.nodes import Ops
from simulator.program import AllToAll, Collective, Compute, Memory

#: Each of 8 ranks has one of 8 experts. A token of 256 numbers in bf16 goes to two, and so to two ranks.
MOE = {"experts": 8, "top_k": 2, "ffn_hidden": 512}
TOKENS, TOKEN, COPIES = 128, 256 * 2, 2 * 128


def layer_with(
    moe: dict[str, Any] = MOE,
    ranks: int = 8,
    training: dict[str, Any] | None = None,
    framework: str = "megatron_core",
    **parallelism: Any,
) -> Part:
    """Return the only layer of a job whose group of experts has so many ranks, eight on each node."""
    job = {
        "model": {"layers": 1, "hidden": 256, "heads": 4, "vocab": 512, "moe": moe},
        "framework": framework,
        "training": {"seq": TOKENS, "micro_batch": 1, "global_batch": ranks, **(training or {})},
        "parallelism": {"dp": ranks, "ep": ranks, **parallelism},
        "cluster": {"name": "dgx_h100", "nodes": (ranks + 7) // 8},
    }
    return next(part for part in stage_parts(load_workload(job), 0) if part.name == "moe layer")


def kernels(ops: Ops) -> list[Compute]:
    return [op for op in ops if isinstance(op, Compute)]


def names_of(ops: Ops) -> list[str]:
    """Return the names of kernels and collectives in order."""
    return [op.name for op in ops if isinstance(op, Compute | Collective | AllToAll)]


def traffic(ops: Ops, name: str) -> tuple[float, float]:
    """Return the bytes that the kernel of this name reads and writes."""
    kernel = next(op.kernel for op in kernels(ops) if op.name == name)
    assert isinstance(kernel, Memory)
    return kernel.read_bytes, kernel.write_bytes


def waits(ops: Ops) -> list[str]:
    return [op.name for op in ops if isinstance(op, Compute | Collective) and op.host_waits]


def travelling(ops: Ops) -> dict[str, float]:
    return {op.name.removeprefix("ep.all_to_all "): op.nbytes for op in ops if isinstance(op, AllToAll)}


def test_hybridep_finds_places_from_the_choices_of_all_ranks() -> None:
    """Choices of 128 tokens among 8 experts on 8 ranks are as many bytes.

    Of each of 1,024 tokens it is written whether it wants the one expert here, a byte, and where this rank's tokens lie
    on each rank, 4 bytes. Of 256 tokens that arrive a byte is read, and a number is written, read and written again.
    """
    part = layer_with(dispatcher="hybridep")
    gathered = {op.name: op.nbytes for op in part.forward if isinstance(op, Collective)}
    assert gathered["ep.all_gather choices"] == 128 * 8 * 8
    assert traffic(part.forward, "moe.places") == (128 * 8 * 8, 1024 + 4 * 1024)
    assert traffic(part.forward, "moe.rows") == (COPIES * (1 + 4), COPIES * 2 * 4)
    assert waits(part.forward) == ["moe.rows"]
    assert waits(part.backward) == []


def test_hybridep_sends_probabilities_of_a_node_with_a_token() -> None:
    """Eight experts of a node are 32 bytes, which gradients of tokens have beside them too, and outputs have not.

    Of sixteen experts on two nodes a token takes the eight of the node that it goes to.
    """
    for ranks, experts in ((8, 8), (16, 16)):
        part = layer_with(MOE | {"experts": experts}, ranks, dispatcher="hybridep")
        assert travelling((*part.forward, *part.backward)) == {
            "dispatch": COPIES * (TOKEN + 32),
            "combine": COPIES * TOKEN,
            "combine grad": COPIES * TOKEN,
            "dispatch grad": COPIES * (TOKEN + 32),
        }
        assert traffic(part.backward, "moe.permute bwd")[1] == COPIES * (TOKEN + 32)


@pytest.mark.parametrize(("ranks", "copied"), [(8, []), (16, ["moe.to buffer", "moe.to buffer probs"])])
def test_hybridep_copies_what_leaves_a_node_into_buffers(ranks: int, copied: list[str]) -> None:
    """Tokens with their probabilities of all experts, backward the gradients of outputs alone."""
    part = layer_with(MOE | {"experts": ranks}, ranks, dispatcher="hybridep")
    assert [name for name in names_of(part.forward) if name.startswith("moe.to buffer")] == copied
    assert [name for name in names_of(part.backward) if name.startswith("moe.to buffer")] == [
        "moe.to buffer bwd" for _ in copied[:1]
    ]
    if copied:
        assert traffic(part.forward, "moe.to buffer") == (TOKENS * TOKEN, TOKENS * TOKEN)
        assert traffic(part.forward, "moe.to buffer probs") == (TOKENS * 16 * 4, TOKENS * 16 * 4)


def test_hosts_wait_four_times_for_deepep() -> None:
    """Once for its counts, and thrice behind the transfer for how many choices are of this rank.

    A mask picks choices and probabilities, and rows are repeated as often as a token has an expert here
    (``_indices_to_multihot``).
    """
    part = layer_with(dispatcher="deepep")
    names = names_of(part.forward)
    waited = waits(part.forward)
    assert waited == [
        "ep.all_gather token counts",
        "moe.own choices count to host",
        "moe.own sum to host",
        "moe.own probs count to host",
    ]
    assert names.index(waited[0]) < names.index("ep.all_to_all dispatch") < names.index(waited[1])
    assert names.index(waited[-1]) < names.index("moe.row map in blocks") < names.index("moe.permute")
    assert waits(part.backward) == []


def test_deepep_sends_choices_and_probabilities_with_a_token() -> None:
    """Two choices (int64) and their probabilities (fp32) go with a token; gradients of these come back with its own."""
    part = layer_with(dispatcher="deepep")
    assert travelling((*part.forward, *part.backward)) == {
        "dispatch": COPIES * (TOKEN + 2 * (8 + 4)),
        "combine": COPIES * TOKEN,
        "combine grad": COPIES * TOKEN,
        "dispatch grad": COPIES * (TOKEN + 2 * 4),
    }


def test_deepeps_choices_become_a_map() -> None:
    """256 tokens arrive, each with a choice for this rank's expert and one for another's.

    The map of one expert is written in int64 and read again for a byte. Of 256 true places of the mask rows and columns
    are written, 16 bytes each, and read for a choice of 8 bytes. Top-k goes back into zeros for 8 experts.
    """
    part = layer_with(dispatcher="deepep")
    assert traffic(part.forward, "moe.map zero") == (0, 8 * COPIES)
    assert traffic(part.forward, "moe.map cast") == (8 * COPIES, COPIES)
    assert traffic(part.forward, "moe.own choices rows and columns") == (8 * COPIES, 16 * COPIES)
    assert traffic(part.forward, "moe.own choices") == (24 * COPIES, 8 * COPIES)
    assert traffic(part.backward, "moe.choices zero grad") == (0, TOKENS * 8 * 4)
    backward = names_of(part.backward)
    places = [backward.index(name) for name in ("moe.permute bwd", "moe.own probs bwd", "ep.all_to_all dispatch grad")]
    assert places == sorted(places)
    assert backward.index("moe.choices bwd") > places[-1]


def test_transformer_engine_finds_rows_before_it_copies_them() -> None:
    """Three kernels over pairs of 128 tokens and 16 experts, of a byte and 4 bytes, to 2 numbers for each copy and one
    for each token. Chunks of two experts on a rank are sorted by a map of 4 bytes for each row, there and back, and
    none is cut.
    """
    part = layer_with(MOE | {"experts": 16})
    pairs = TOKENS * 16
    assert traffic(part.forward, "moe.row map in blocks") == (pairs, 4 * pairs)
    assert traffic(part.forward, "moe.row map of blocks") == (4 * pairs, 4 * pairs)
    assert traffic(part.forward, "moe.row map dense") == (4 * pairs, 4 * (TOKENS + 2 * COPIES))
    assert names_of(part.forward).count("moe.chunk map") == 2
    assert traffic(part.forward, "moe.chunk map") == (0, 4 * COPIES)
    assert not [name for name in names_of(part.backward) if "map" in name]
    sorting = [op.kernel for op in kernels((*part.forward, *part.backward)) if "sort" in op.name]
    assert len(sorting) == 4
    assert not any(kernel.parts for kernel in sorting if isinstance(kernel, Memory))


def test_chunks_of_a_fixed_size_need_no_map() -> None:
    padded = MOE | {"experts": 16, "capacity_factor": 1.0, "pad_to_capacity": True}
    assert "moe.chunk map" not in names_of(layer_with(padded).forward)


def test_counts_of_chunks_stay_on_the_gpu_where_a_kernel_sorts_them() -> None:
    """PyTorch cuts chunks by counts that the host has (``_maybe_dtoh_and_synchronize``)."""
    for fused, copies in ((True, 4), (False, 5)):
        part = layer_with(MOE | {"experts": 16}, training={"fused_permutation": fused})
        assert sum(name.startswith("moe.counts") and "to host" in name for name in names_of(part.forward)) == copies


def test_deepspeed_has_no_maps_of_transformer_engine() -> None:
    """Megatron-DeepSpeed's layer of experts is DeepSpeed's own, which does not call Transformer Engine."""
    part = layer_with(framework="deepspeed")
    assert not [name for name in names_of((*part.forward, *part.backward)) if "map" in name]

"""Ways of tokens to their experts: how often each travels, and what each way cannot do."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from simulator.config import Workload, load_workload
from simulator.errors import InputError
from simulator.models import layer
from simulator.models.dispatching import bytes_per_node, distinct, reach
from simulator.program import Memory, kernels_of
from tests.support.experts import job, play
from tests.support.random_checks import same_without_shortcuts
from tests.support.random_plays import Plays

#: Eight experts on eight ranks of a node, or on sixteen of two.
NODE: dict[str, Any] = {"dp": 8, "ep": 8}
NODES: dict[str, Any] = {"dp": 16, "ep": 16}
SIXTEEN = {"experts": 16, "top_k": 4}
#: Bytes of a token: hidden 256 in bf16; 128 tokens and two layers a rank and micro-batch, two all-to-alls each way.
TOKEN, TRIPS = 256 * 2, 128 * 2 * 4


@pytest.mark.parametrize(("experts", "chosen", "groups"), [(8, 2, 4), (8, 3, 2), (6, 3, 3), (4, 4, 2), (8, 1, 8)])
def test_groups_that_a_token_goes_to_are_counted(experts: int, chosen: int, groups: int) -> None:
    """The mean over all ways to choose, one by one."""
    each = experts // groups
    ways = list(itertools.combinations(range(experts), chosen))
    mean = sum(len({expert // each for expert in way}) for way in ways) / len(ways)
    assert distinct(experts, chosen, groups) == pytest.approx(mean)


def test_a_node_limit_confines_ranks_and_nodes() -> None:
    """Four of sixteen experts on two nodes: with one node allowed they are four of its eight, one on each rank."""
    for limit, ranks, nodes in ((1, 4.0, 1.0), (2, 4.0, distinct(16, 4, 2)), (None, 4.0, distinct(16, 4, 2))):
        work = load_workload(job(moe=SIXTEEN | {"node_limit": limit}, parallelism=NODES))
        assert reach(work) == pytest.approx((ranks, nodes))


@pytest.mark.parametrize("dispatcher", ["all_to_all", "deepep"])
def test_a_wider_node_limit_sends_a_token_to_more_nodes(dispatcher: str) -> None:
    """DeepSeek-V3's 8 of 256 experts are chosen at random among those of some nodes; a limit of all eight is none."""
    layout = {"dp": 64, "ep": 64, "dispatcher": dispatcher}

    def loaded(limit: int | None) -> Workload:
        moe = {"experts": 256, "top_k": 8, "node_limit": limit}
        return load_workload(job(moe=moe, parallelism=layout, training__global_batch=64))

    nodes = [reach(loaded(limit)).nodes for limit in range(1, 9)]
    assert nodes == sorted(nodes)
    assert nodes[:2] == pytest.approx([1.0, distinct(64, 8, 2)])
    assert reach(loaded(None)).nodes == nodes[-1] == pytest.approx(distinct(256, 8, 8))
    crossing = [bytes_per_node(loaded(limit)) for limit in range(1, 9)]
    each = [8.0] * 8 if dispatcher == "all_to_all" else [reach(loaded(limit)).ranks for limit in range(1, 9)]
    assert [share * copies for share, copies in zip(crossing, each, strict=True)] == pytest.approx(nodes)


def test_nodes_of_a_group_are_rounded_up() -> None:
    """Twelve ranks need two nodes of eight, so that half of twelve experts are on a node that a token may go to."""
    moe = {"experts": 12, "top_k": 4, "node_limit": 1}
    work = load_workload(job(moe=moe, parallelism={"dp": 12, "ep": 12}, training__global_batch=12))
    assert reach(work) == pytest.approx((4.0, 1.0))
    assert bytes_per_node(work) == pytest.approx(1 / 4)


def test_copies_of_experts_are_places_and_no_further_choices() -> None:
    """A node holds 16 of 16 experts and 16 copies. A token of 12 choices goes to all ranks of its one node."""
    moe = {"experts": 16, "redundant_experts": 16, "top_k": 12, "node_limit": 1}
    work = load_workload(job(moe=moe, parallelism=NODES, training__global_batch=16))
    assert reach(work) == pytest.approx((8.0, 1.0))


def sent(dispatcher: str, layout: dict[str, Any], moe: dict[str, Any]) -> float:
    """Return the bytes that a GPU sends to experts and back in a step of one micro-batch, without counts of tokens."""
    work = job(moe=moe, parallelism={**layout, "dispatcher": dispatcher}, training__global_batch=layout["dp"])
    result = load_and_play(work)
    counts = 8 * moe.get("experts", 8) * layout["ep"] * (layout["ep"] - 1) / layout["ep"] * 2
    has_counts = dispatcher in ("all_to_all", "deepep")
    return result["communication"]["ep"]["bytes_per_gpu"] - (counts if has_counts else 0.0)


def load_and_play(work: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a workload."""
    return play(**{key: value for key, value in work.items() if key in ("model", "training", "parallelism")}).to_dict()


def test_a_copy_travels_for_each_expert_or_a_token_once_to_each_rank() -> None:
    """Seven eighths of what is sent leave a rank of eight in a node.

    A token has two copies, for two of sixteen experts, but goes to 8 (1 - 14/16 13/15) = 1.933 ranks. Behind each copy
    goes its probability in fp32, and the gradient of that comes back: 8 bytes in each of two layers. DeepEP takes both
    choices (int64) and probabilities to each rank, and both gradients back: 32 bytes. HybridEP takes the probabilities
    of all sixteen experts, and their gradients back: 128 bytes. Each rank gives its map of choices to seven others.
    """
    moe = {"experts": 16, "top_k": 2}
    reached, layers = 8 * (1 - 14 / 16 * 13 / 15), 128 * 2
    probabilities = 8 * 2 * layers
    assert sent("all_to_all", NODE, moe) == pytest.approx((2 * TOKEN * TRIPS + probabilities) * 7 / 8)
    assert sent("deepep", NODE, moe) == pytest.approx(reached * (TOKEN * TRIPS + 32 * layers) * 7 / 8)
    hybridep = reached * (TOKEN * TRIPS + 128 * layers) * 7 / 8 + 16 * layers * 7
    assert sent("hybridep", NODE, moe) == pytest.approx(hybridep)


@pytest.mark.parametrize(("router", "width"), [("fp32", 4), ("bf16", 2)])
def test_all_ranks_get_all_tokens_by_all_gather(router: str, width: int) -> None:
    """Each collective sends 7/8 of what eight ranks have. Tokens go in bf16, and their gradients come back so. What
    experts give is summed in the type of the router's probabilities, and so its gradient travels. Choices (bool) and
    probabilities of all 16 experts go too, and the gradients of the latter come back, in two layers."""
    moe = {"experts": 16, "top_k": 2, "router_dtype": router}
    tokens = 7 * TOKEN * TRIPS / 2 * (1 + width / 2)
    choices = 7 * (1 + 2 * width) * 16 * 128 * 2
    assert sent("all_gather", NODE, moe) == pytest.approx(tokens + choices)


def test_between_nodes_a_token_travels_once() -> None:
    """A token goes to all ranks of both nodes, with every expert chosen.

    Its copies for the eight of the other node cross the network one by one, or as one. Gradients cross it too. One by
    one, the probability of each copy follows it in fp32, and its gradient comes back, in both layers. DeepEP takes
    sixteen choices (int64) and probabilities with a token, and gradients of these back.
    """
    moe = {"experts": 16, "top_k": 16}
    crossing = {}
    for dispatcher in ("all_to_all", "deepep"):
        work = job(moe=moe, parallelism={**NODES, "dispatcher": dispatcher}, training__global_batch=16)
        result = play(**{key: work[key] for key in ("model", "training", "parallelism")})
        links = [link for link in result.to_dict()["links"] if "nic" in link["name"] and "pcie" not in link["name"]]
        crossing[dispatcher] = max(link["bytes"] for link in links)
    probabilities = 8 * 4 * 128 * 2 * 2
    beside = 16 * (8 + 4 + 4) * 128 * 2
    assert crossing["all_to_all"] - crossing["deepep"] == pytest.approx(7 * TOKEN * TRIPS + probabilities - beside)


@pytest.mark.parametrize(
    ("dispatcher", "layout", "skew"), [("deepep", {"dp": 4, "ep": 4}, 1.0), ("all_gather", NODES, 0.0)]
)
def test_other_dispatchers_keep_the_rules(dispatcher: str, layout: dict[str, Any], skew: float) -> None:
    moe = SIXTEEN | {"token_distribution": {"skew": skew}, "shared_experts": 1}
    work = job(moe=moe, parallelism={**layout, "dispatcher": dispatcher, "zero": 1}, training__global_batch=16)
    assert list(same_without_shortcuts(Plays(work))) == []


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"parallelism": {**NODE, "dispatcher": "deepep"}, "framework": "pytorch"}, "Megatron-Core's"),
    ({"parallelism": {**NODE, "tp": 2, "etp": 2, "dispatcher": "deepep"}}, "takes whole experts"),
    ({"parallelism": {**NODE, "dispatcher": "hybridep"}, "moe": {"capacity_factor": 1.0}}, "drops no tokens"),
    (
        {"parallelism": {**NODE, "dispatcher": "all_gather", "overlap": {"expert_all_to_all": True}}},
        "nothing hides the gathering",
    ),
    (
        {"parallelism": {"dp": 16, "ep": 16, "dispatcher": "deepep"}, "moe": SIXTEEN, "cluster": "gb200_nvl72"},
        "DeepEP reaches 8 GPUs of a node",
    ),
)


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_a_dispatcher_cannot_do_is_said(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_workload(job(**changes))


@pytest.mark.parametrize(
    ("framework", "ep", "etp", "copies"),
    [
        ("pytorch", 1, 1, 0),  # rows of one rank are in order
        ("deepspeed", 1, 1, 1),  # sorted all the same
        *((framework, *layout, 1) for framework in ("pytorch", "deepspeed") for layout in ((2, 1), (1, 2), (2, 2))),
        *((framework, 8, 1, 0) for framework in ("pytorch", "deepspeed")),  # one expert a rank
    ],
)
def test_rows_of_several_ranks_are_put_in_the_order_of_experts(framework: str, ep: int, etp: int, copies: int) -> None:
    """128 tokens go to two experts each: 256 rows of 256 elements of 2 bytes, read and written. They are sorted before
    the experts and put back behind them, and so are their gradients. A part comes from each rank for each expert.
    (Transformer Engine's kernel under Megatron-Core goes by rows, not by parts.)"""
    work = load_workload(job(framework=framework, parallelism={"tp": etp, "etp": etp, "dp": ep, "ep": ep}))
    part = layer(work)
    names = ("moe.sort", "moe.unsort", "moe.unsort bwd", "moe.sort bwd")
    rows = 2.0 * 256 * 256
    kernels = [one for op in (*part.forward, *part.backward) for one in kernels_of(op) if one.name in names]
    moved = [(one.name, one.kernel) for one in kernels if isinstance(one.kernel, Memory) and one.kernel.parts]
    assert [name for name, _ in moved] == copies * list(names)
    assert {(kernel.read_bytes, kernel.write_bytes, kernel.parts) for _, kernel in moved} <= {(rows, rows, 8 * etp)}

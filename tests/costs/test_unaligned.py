"""Products with rows that are no multiple of 16 bytes, and attention that drops probabilities, beside real traces."""

from __future__ import annotations

import csv
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from simulator.config.profile import load_profile
from simulator.costs import Costs
from simulator.costs.matmul import is_aligned
from simulator.frameworks import find_framework
from simulator.hardware.profile import Profile
from simulator.program import Attention, Matmul

GPU = "h200-sxm-141gb"
KERNELS = Path(__file__).resolve().parents[2] / "calibration" / "measurements" / "hugging-face-kernels.csv"
TOKENS, WORDS = 8 * 1024, 50257


@cache
def profile() -> Profile:
    return load_profile(GPU)


def traced_s(case: str, *words: str) -> float:
    """Seconds of a launch, of all kernels together that have one of ``words`` in their name."""
    with KERNELS.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["case"] == case]
    chosen = [row for word in words for row in rows if word in row["kernel"]]
    return sum(1e-6 * float(row["total_us"]) / int(row["launches"]) for row in chosen)


@pytest.mark.parametrize(
    ("sizes", "role", "aligned"),
    [
        ((8192, 50257, 768), "fwd", False),  # rows of the output are 50,257 long
        ((8192, 768, 50257), "dgrad", False),  # those of the output's gradient
        ((50257, 768, 8192), "wgrad", False),  # likewise
        ((8191, 768, 768), "fwd", True),  # as many rows as there may be
        ((768, 768, 8191), "wgrad", True),
        ((8192, 768, 150), "dgrad", False),
    ],
)
def test_rows_decide_and_their_number_does_not(sizes: tuple[int, int, int], role: str, aligned: bool) -> None:
    m, n, k = sizes
    assert is_aligned(Matmul(m, n, k, dtype="bf16", role=role)) == aligned
    assert is_aligned(Matmul(m, n, k, dtype="fp32", role=role))  # was not measured


@pytest.mark.parametrize(("case", "width"), [("gpt2_b8_s1024", 768), ("gpt2-medium_b8_s1024", 1024)])
def test_products_of_gpt2s_words_take_what_they_took(case: str, width: int) -> None:
    costs = Costs.from_profile(profile(), find_framework("hugging_face"))
    products = {
        "tn_align1": Matmul(TOKENS, WORDS, width, dtype="bf16", role="fwd"),
        "nn_align1": Matmul(TOKENS, width, WORDS, dtype="bf16", role="dgrad"),
        "nt_align1": Matmul(WORDS, width, TOKENS, dtype="bf16", role="wgrad"),
    }
    for name, product in products.items():
        assert costs.kernel_s(product, GPU) == pytest.approx(traced_s(case, name), rel=0.03)


def test_what_inductor_pads_is_aligned() -> None:
    """Under torch.compile the same product takes a seventh of the time at most."""
    compiled, eager = (Costs.from_profile(profile(), find_framework("pytorch", compile=one)) for one in (True, False))
    product = Matmul(TOKENS, WORDS, 768, dtype="bf16", role="fwd")
    assert eager.kernel_s(product, GPU) > 6 * compiled.kernel_s(product, GPU)


@pytest.mark.parametrize(("case", "heads"), [("gpt2_b8_s1024", 12), ("gpt2-medium_b8_s1024", 16)])
@pytest.mark.parametrize(
    ("backward", "names"), [(False, ("fprop",)), (True, ("bprop", "compute_dot_do_o", "convert_dq"))]
)
def test_dropping_probabilities_takes_what_it_took(
    case: str, heads: int, backward: bool, names: tuple[str, ...]
) -> None:
    """Without dropout the forward kernel is priced at less than half of that."""
    costs = Costs.from_profile(profile(), find_framework("hugging_face"))
    kernel = Attention(8, heads, heads, 1024, 1024, 64, backward=backward, dropout=True)
    seconds = costs.kernel_s(kernel, GPU)
    assert seconds == pytest.approx(traced_s(case, *names), rel=0.25 if backward else 0.03)
    plain_s = costs.kernel_s(replace(kernel, dropout=False), GPU)
    assert plain_s < (0.85 if backward else 0.5) * seconds


def test_a_higher_clock_speeds_up_what_the_limit_holds_down_alone() -> None:
    """Aligned products are priced at 1,473 MHz, where the power limit holds them. They gain by a higher clock, up to
    1,871 MHz: (1871 / 1473)^0.709 = 1.185. Those of GPT-2's words were measured in a step, and draw a seventh of
    what a large product does: they gain nothing."""
    costs = Costs.from_profile(profile(), find_framework("hugging_face"))
    for words, gain in ((WORDS - 1, 1.185), (WORDS, 1.0)):
        product = Matmul(TOKENS, words - words % 8 if gain > 1 else words, 768, dtype="bf16", role="fwd")
        faster = costs.kernel_s(product, GPU) / costs.kernel_s(product, GPU, 1.98e9)
        assert faster == pytest.approx(gain, rel=1e-3)

"""Rules that people rely on, R20 to R26: tensor, sequence and context parallelism. Each is accepted, refused with what
would work, or counted exactly."""

from __future__ import annotations

import re
from typing import Any

import pytest

from simulator import models
from simulator.config import Workload, load_workload, warnings
from simulator.errors import InputError
from simulator.operations.weights import elements


def workload(heads: int = 32, kv_heads: int | None = None, seq: int = 1920, **parallelism: Any) -> Workload:
    sizes = {"layers": 4, "hidden": 64 * heads, "heads": heads, "ffn_hidden": 14400, "vocab": 32000, "head_dim": 64}
    return load_workload(
        {
            "model": sizes | ({"kv_heads": kv_heads} if kv_heads else {}),
            "training": {"seq": seq, "global_batch": 240},
            "parallelism": parallelism,
            "cluster": "dgx_h100",
        }
    )


def refused(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(InputError) as caught:
        workload(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize(
    ("keys", "fix"),
    [
        ({"tp": 3, "heads": 24, "seq": 8192}, {"tp": 4}),
        ({"tp": 3, "heads": 32, "seq": 8192}, {"tp": 4}),
        ({"tp": 6, "heads": 24, "seq": 8192}, {"tp": 8}),
        ({"cp": 3, "heads": 24, "seq": 8192}, {"cp": 4}),
        ({"tp": 5, "heads": 5, "seq": 8191}, {"seq": 8190}),
    ],
)
def test_a_sequence_that_does_not_split_names_a_size_that_does(keys: dict[str, Any], fix: dict[str, Any]) -> None:
    """A person has a sequence length in mind rather than 8193, and one error is enough where heads do not split."""
    message = refused(**keys)
    ((key, value),) = fix.items()
    assert message.count("found:") == 1
    assert f"fix:     {key}: {value}" in message
    assert workload(**{**keys, **fix})


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_r20_kv_heads_are_replicated_over_tp(kv_heads: int) -> None:
    """tp 8 with fewer KV heads: every rank has a whole one, so that a rank holds 8 / kv times the weights and keeps as
    much more of keys and values as an equal share would be."""
    split, shared = workload(32, 8, tp=8), workload(32, kv_heads, tp=8)
    whole = workload(32, kv_heads)
    for work in (split, shared):
        # One KV head a rank either way.
        assert elements(models.layer(work).weights) == elements(models.layer(split).weights)
        saved = {tensor.name: tensor.nbytes for tensor in models.layer(work).saved}
        assert saved["attn.k"] == saved["attn.v"] == 2 * 1920 * 64
    column = 64 * 32 * 64  # hidden x head_dim, of keys or of values
    excess = 8 * elements(models.layer(shared).weights) - elements(models.layer(whole).weights)
    replicated_rows = 7 * (2 * 64 * 32 * 2 + 64 * 32 * 2)  # norms and row biases are on every rank
    kv_bias = 64
    assert excess == 2 * (8 - kv_heads) * (column + kv_bias) + replicated_rows
    # Their gradients are summed over the ranks that share them.
    partial, norms = (sum(w.partial_elements for w in models.layer(work).weights) for work in (shared, split))
    assert partial - norms == 2 * (column + kv_bias)


def test_r20_refused_where_neither_divides() -> None:
    """12 KV heads on tp 8 (24 query heads)."""
    assert "neither tp 8 nor kv_heads 12 divides the other" in refused(24, 12, tp=8)


@pytest.mark.parametrize(
    ("heads", "tp", "allowed"),
    [
        (40, 3, "1, 2, 4, 5, 8, 10, 20, 40"),
        (52, 8, "1, 2, 4, 13, 26, 52"),
        (28, 8, "1, 2, 4, 7, 14, 28"),
    ],
)
def test_r21_heads_that_tp_does_not_divide(heads: int, tp: int, allowed: str) -> None:
    text = refused(heads, tp=tp)
    assert f"{heads} heads do not divide by tp {tp}" in text
    assert allowed in text


@pytest.mark.parametrize(
    ("heads", "kv_heads", "keys", "tp"),
    [
        (52, None, {"tp": 8}, 4),  # 13 is nearer, divides no MLP of 14,400, and is more than a node has
        (48, None, {"tp": 32}, 8),  # 24 and 48 are nearer, and more than a node has
        (28, None, {"tp": 8}, 4),  # 7 divides no MLP of 14,400
        (12, None, {"tp": 8, "seq": 1926}, 6),  # 12 is more than a node has
        (12, None, {"tp": 8, "seq": 1924}, 4),  # 6 does not divide the sequence either
        (12, None, {"tp": 8, "seq": 1924, "sequence_parallel": False}, 6),
        (60, None, {"tp": 7, "seq": 1921}, 1),  # nothing does
        (24, 12, {"tp": 8}, 6),  # 8 divides the query heads alone
    ],
)
def test_r21_the_tp_that_is_proposed_runs_and_stays_in_a_node(
    heads: int, kv_heads: int | None, keys: dict[str, Any], tp: int
) -> None:
    """It divides the MLP's width and, with sequence parallelism, the sequence, and splits the key and value heads."""
    assert f"fix:     tp: {tp}" in refused(heads, kv_heads, **keys)
    assert workload(heads, kv_heads, **keys | {"tp": tp}).parallelism.tp == tp


@pytest.mark.parametrize(("tp", "runs", "refuses"), [(1, (1, 8, 40), (3, 16)), (2, (4, 20), (8, 16)), (8, (5,), (2,))])
def test_r22_ulysses_gives_whole_heads_to_every_rank(tp: int, runs: tuple[int, ...], refuses: tuple[int, ...]) -> None:
    """40 query and 8 KV heads, of which tp leaves 40 / tp and 8 / tp: cp divides the first, and divides the second or
    is a multiple of it."""
    for cp in runs:
        assert workload(40, 8, seq=1600, tp=tp, cp=cp, cp_method="ulysses").parallelism.cp == cp
    for cp in refuses:
        text = refused(40, 8, seq=1600 * 3, tp=tp, cp=cp, cp_method="ulysses")
        assert "parallelism.cp" in text
        assert "whole heads" in text


@pytest.mark.parametrize(
    ("keys", "unit"),
    [
        ({"tp": 4}, 4),
        ({"tp": 4, "sequence_parallel": False}, 1),
        ({"cp": 4}, 8),
        ({"cp": 4, "cp_layout": "contiguous"}, 4),
        ({"cp": 4, "cp_method": "ulysses"}, 4),
        ({"cp": 4, "tp": 4}, 16),
        ({"cp": 2, "tp": 1}, 4),
        ({"cp": 4, "tp": 2}, 8),
        ({"cp": 4, "tp": 2, "cp_layout": "contiguous"}, 8),
        ({"cp": 4, "tp": 2, "sequence_parallel": False}, 8),
    ],
)
def test_r23_what_a_sequence_is_a_multiple_of(keys: dict[str, Any], unit: int) -> None:
    """tp with sequence parallelism, 2 cp for a balanced ring, cp lcm(2, tp) with both: that runs, and so many and one
    do not, nor half of it where that is another number."""
    assert workload(seq=unit * 15, **keys)
    for seq in {unit * 15 + 1, unit * 15 + unit // 2} - {unit * 15}:
        if seq % unit:
            text = refused(seq=seq, **keys)
            assert "training.seq" in text
            assert f"a multiple of {unit}" in text


@pytest.mark.parametrize(
    ("vocab", "tp", "rows"), [(151_552, 6, 152_064), (32_000, 2, 32_000), (50_257, 8, 51_200), (151_552, 1, 151_552)]
)
def test_r24_the_vocabulary_is_padded_once(vocab: int, tp: int, rows: int) -> None:
    """To a multiple of 128 tp; a rank has 1/tp of the rows."""
    work = load_workload(
        {
            "model": {"layers": 2, "hidden": 768, "heads": 24, "ffn_hidden": 3072, "vocab": vocab, "position": "rope"},
            "training": {"seq": 1536, "global_batch": 8},
            "parallelism": {"tp": tp},
            "cluster": "dgx_h100",
        }
    )
    assert work.model.padded_vocab(tp) == rows
    assert elements(models.embedding(work).weights) == rows // tp * 768
    if tp == 6:
        assert rows // tp == 25_344


def test_r25_five_gpus_for_32_heads() -> None:
    """tp 5 is refused; dp 5 is proposed, or pp 5 with its uneven split."""
    sizes = {"layers": 32, "hidden": 2048, "heads": 32, "vocab": 32000}
    section: dict[str, Any] = {"training": {"seq": 1920, "global_batch": 240}, "cluster": "dgx_h100", "model": sizes}
    with pytest.raises(InputError) as caught:
        load_workload({**section, "parallelism": {"tp": 5}})
    split = [7, 7, 6, 6, 6]
    for part in ("32 heads do not divide by tp 5", "dp: 5", f"pp: 5 and layers_per_stage: {split}"):
        assert part in str(caught.value)
    assert load_workload({**section, "parallelism": {"dp": 5}}).n_ranks == 5
    assert load_workload({**section, "parallelism": {"pp": 5, "layers_per_stage": split}}).n_ranks == 5


def test_r26_selective_recompute_saves_the_square_and_flash_has_none() -> None:
    """Without flash the probabilities go, 2 a s^2 b bytes. With flash only the log-sum-exp is dropped, 4 bytes per head
    and token. That is under a hundredth, and a warning says so, and what it costs.

    With s = h a token of a causal layer takes 72 h^2 FLOPs in products, and 2 h^2 in attention's forward pass. Flash's
    backward pass has five products for two: 5 h^2. The vocabulary takes 6 V h = 93.75 h^2. So four layers make
    409.75 h^2. Attention's forward passes are 8 h^2 more, 2.0 %.
    """

    def saved(attention: str, recompute: str) -> tuple[float, list[str]]:
        work = load_workload(
            {
                "model": {"layers": 4, "hidden": 2048, "heads": 32, "vocab": 32000, "attention": attention},
                "training": {"seq": 2048, "global_batch": 8, "recompute": recompute},
                "cluster": "dgx_h100",
            }
        )
        return models.layer(work).saved_bytes, models.warnings(work)

    (flash, _), (flash_selective, notes) = saved("flash", "none"), saved("flash", "selective")
    assert 0 <= 1 - flash_selective / flash < 0.01
    (told,) = [note for note in notes if "selective recompute saves almost nothing" in note]
    assert "2.0% more FLOPs" in told
    (unfused, _), (selective, notes) = saved("unfused", "none"), saved("unfused", "selective")
    assert unfused - selective == 2 * 32 * 2048**2
    assert not any("selective" in note for note in notes)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"hidden": 4096, "heads": 32, "activation": "swiglu"}, "16,384, GPT's, and swiglu .* 256: 11,008$"),
        ({"hidden": 5120, "heads": 40, "activation": "geglu"}, "20,480, GPT's, and geglu .* 256: 13,824$"),
        ({"hidden": 4096, "heads": 32, "activation": "swiglu", "ffn_hidden": 16_384}, ""),
        ({"hidden": 4096, "heads": 32, "activation": "gelu"}, ""),
        (
            {"hidden": 512, "heads": 8, "activation": "swiglu", "moe": {"experts": 8, "top_k": 2, "ffn_hidden": 512}},
            "",
        ),
        ({"preset": "llama2-7b"}, ""),
    ],
)
def test_a_gated_mlp_of_gpts_width_is_told_with_llamas(model: dict[str, Any], told: str) -> None:
    """Llama 2's: 11,008 of 4,096 and 13,824 of 5,120. Whoever gives the width means it, and experts have their own."""
    sizes = {} if "preset" in model else {"layers": 4, "vocab": 32_000}
    job = load_workload(
        {"model": {**sizes, **model}, "training": {"seq": 512, "global_batch": 8}, "cluster": "dgx_a100"}
    )
    found = [note for note in warnings(job) if "ffn_hidden" in note]
    assert len(found) == bool(told)
    assert not told or re.search(told, found[0])

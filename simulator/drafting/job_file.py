"""Text of a workload file, a comment beside each key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from simulator.drafting.layouts import SPARE, ProposedLayout
from simulator.output.accuracy_text import interval_text
from simulator.units import format_gib, format_time

#: Dotted key -> what stands beside it. Keys of a layout come in this order.
COMMENTS = {
    "model.preset": "a shipped model: llmsim list models",
    "model.hf_config": "the model's sizes, as Hugging Face has them",
    "model.encoder": "the text model alone, without its encoder of images",
    "framework": "whose kernels, buffers and defaults",
    "framework.name": "whose kernels, buffers and defaults",
    "framework.compile": "under torch.compile",
    "training.seq": "tokens per sequence",
    "training.global_batch": "sequences per step, on all GPUs together",
    "training.micro_batch": "sequences per micro-batch and replica",
    "training.precision": "the GPU has no bf16",
    "training.fp8": "whose casts and scales: llmsim list recipes",
    "training.adapters": "LoRA: thin trained matrices beside frozen products",
    "training.base": "frozen products in four bits, as in QLoRA",
    "training.recompute": "activations that the backward pass computes again",
    "parallelism.tp": "tensor parallelism: GPUs that share each layer",
    "parallelism.pp": "pipeline parallelism: stages",
    "parallelism.cp": "context parallelism: GPUs that share each sequence",
    "parallelism.dp": "data parallelism: copies of the model, or shards of one",
    "parallelism.ep": "expert parallelism: GPUs that share the experts",
    "parallelism.account_for_embedding": "the embedding counts as a layer",
    "parallelism.account_for_loss": "so does the loss",
    "cluster": "llmsim topology shows it",
}
#: `parallelism.zero` -> what it says; of the written value alone, for frameworks have not all of them.
_ZERO = (
    "nothing is split over replicas",
    "optimizer states are split over replicas",
    "optimizer states and gradients are split over replicas",
    "weights, gradients and optimizer states are split over replicas",
)
#: Values of a layout's keys that go without saying.
_PLAIN: Mapping[str, Any] = {
    "parallelism.cp": 1,
    "parallelism.ep": 1,
    "parallelism.etp": 1,
    "parallelism.pp": 1,
    "parallelism.tp": 1,
    "parallelism.schedule": "1f1b",
    "parallelism.vpp": 1,
    "training.recompute": "none",
}


def layout_keys(changes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a layout's keys by section, without those whose value is the default.

    >>> layout_keys({"parallelism.tp": 2, "parallelism.pp": 1, "parallelism.dp": 4, "training.micro_batch": 1})
    {'parallelism': {'tp': 2, 'dp': 4}, 'training': {'micro_batch': 1}}
    """
    sections: dict[str, dict[str, Any]] = {}
    tp = changes.get("parallelism.tp", 1)
    for key, value in changes.items():
        is_usual = key in _PLAIN and _PLAIN[key] == value
        if key == "parallelism.sequence_parallel":
            is_usual = value is (tp > 1)
        if not is_usual:
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = value
    return sections


def job_text(data: Mapping[str, Any], layout: ProposedLayout, heading: str) -> str:
    """Return the text of a workload file that holds ``data``, under a ``heading`` and what the layout comes to."""
    figures = layout.figures
    head = [
        heading,
        f"The layout is the best {_weighed(layout)}: a step of",
        f"{step_text(figures)}, {format_gib(figures['peak_bytes'])} of "
        f"{format_gib(figures['capacity_bytes'])} on the fullest GPU.",
        trust(figures),
        *([tight_memory(layout)] if layout.spare < SPARE else []),
    ]
    return "\n".join([*(f"# {line}" for line in head), *_lines(data)]) + "\n"


def step_text(figures: Mapping[str, Any]) -> str:
    """Return the step time with its prediction interval in brackets, where there is one."""
    ends = [figures[name] for name in ("step_time_low_s", "step_time_high_s") if name in figures]
    interval = f" ({interval_text(ends)})" if ends else ""
    return f"{format_time(figures['step_time_s'])}{interval}"


def trust(figures: Mapping[str, Any]) -> str:
    """Return how far to trust the step time."""
    if "step_time_low_s" not in figures:
        return (
            "No measured step is comparable: nothing says how far off the time is; llmsim run says in what they differ."
        )
    return "In brackets: where a real step would be measured, nine times in ten; llmsim run says what that rests on."


def _weighed(layout: ProposedLayout) -> str:
    """Return what a layout is the best of."""
    if layout.in_time:
        return f"that simulation found among {layout.n_legal:,} with simple schedules"
    return f"of {layout.n_simulated:,} that were simulated in time, of {layout.n_legal:,} with simple schedules"


def tight_memory(layout: ProposedLayout) -> str:
    """Return what to say of a layout that leaves little memory."""
    return f"Only {layout.spare:.1%} of memory is left, and figures of memory are 6 % off in the mean."


def _lines(data: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield the lines of a mapping; sections without a comment of their own go over several lines."""
    indent = "  " * bool(above)
    for name, value in data.items():
        key = f"{above}{name}"
        comment = _ZERO[value] if key == "parallelism.zero" else COMMENTS.get(key)
        if isinstance(value, Mapping) and comment is None:
            yield f"{indent}{name}:"
            yield from _lines(value, f"{key}.")
        else:
            text = f"{indent}{name}: {_inline(value)}"
            yield f"{text:<40} # {comment}" if comment else text


def _inline(value: Any) -> str:
    """Return a value as YAML writes it in one line.

    >>> _inline({"rank": 16, "targets": ["q", "k"]}), _inline(True), _inline("a: b")
    ('{rank: 16, targets: [q, k]}', 'true', '"a: b"')
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_inline(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_inline, value)) + "]"
    if isinstance(value, str):
        plain = value[:1].isalpha() and all(sign.isalnum() or sign in "_-./" for sign in value)
        return (
            value if plain and value not in ("true", "false", "null", "yes", "no", "on", "off") else json.dumps(value)
        )
    return json.dumps(value)

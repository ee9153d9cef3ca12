"""Tables of errors: pages say in words what is measured, and the figures beside it are the recorded ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from simulator.validation.errors import recorded
from simulator.validation.measured_steps import measured_steps

#: Suites of runs of others' training code: their steps and their memory.
FRAMEWORK_STEPS, FRAMEWORK_MEMORY = "own-frameworks", "own-frameworks-memory"
#: Framework, or a part of its runs, -> how names of these runs begin.
RUNS = {
    "hugging_face": ("hf",),
    "hugging_face_deepspeed": ("ds",),
    "torchtitan": ("tt",),
    "megatron_core_local": ("mc", "mh"),
    "megatron_core_local, dense": ("mc1_gpt", "mc1_llama", "mc2_ddp", "mc2_dist", "mc2_pp", "mc2_tp"),
    "megatron_core_local, experts": ("mc1_moe", "mc2_ep"),
    "megatron_core_local, narrow experts": ("mh",),
}
TABLE = re.compile(r"^<!-- validation -->\n(?P<head>\|.*\n)(?P<rule>\|.*\n)(?P<rows>(?:\|.*\n)+)", flags=re.MULTILINE)


def with_figures(text: str) -> str:
    """Return a page with the recorded figures of suites, frameworks and single steps.

    Only tables behind ``<!-- validation -->`` are touched. A row begins with a name. Heads of columns say which figures
    stand below them, as `error_figures`, `framework_figures` and `step_figures` call these.

    Raises ``ValueError`` where nothing is recorded under a row's name.
    """
    suites = {suite: error_figures(rows.values()) for suite, rows in recorded().items() if rows}
    figures = {**suites, **framework_figures(), **step_figures()}
    return TABLE.sub(lambda table: _filled(table, figures), text)


def framework_figures() -> dict[str, Mapping[str, str]]:
    """Return framework -> its figures by the head of the column; ``memory`` is the mean error of memory."""
    return {
        name: {
            **error_figures(_errors(FRAMEWORK_STEPS, starts)),
            "memory": error_figures(_errors(FRAMEWORK_MEMORY, starts))["mean error"],
        }
        for name, starts in RUNS.items()
    }


def _errors(suite: str, starts: tuple[str, ...]) -> list[float]:
    return [error for run, error in recorded()[suite].items() if run.startswith(starts)]


def error_figures(errors: Iterable[float]) -> Mapping[str, str]:
    """Return what tables say of errors, by the head of the column.

    >>> error_figures([0.01, -0.03])
    {'rows': '2', 'below measured': '1', 'mean error': '2.0 %', 'largest': '3.0 %'}
    """
    percent = [100 * error for error in errors]
    sizes = [abs(one) for one in percent]
    return {
        "rows": str(len(percent)),
        "below measured": str(sum(one < 0 for one in percent)),
        "mean error": f"{sum(sizes) / len(sizes):.1f} %",
        "largest": f"{max(sizes):.1f} %",
    }


def step_figures() -> dict[str, Mapping[str, str]]:
    """Return measured step -> its figures by the head of the column."""
    return {
        step.id: {"measured": f"{step.measured_s:.2f} s", "simulated": f"{step.simulated_s:.1f} s"}
        for step in measured_steps()
    }


def _filled(table: re.Match[str], figures: Mapping[str, Mapping[str, str]]) -> str:
    heads = _cells(table["head"])

    def row(line: str) -> str:
        name, *cells = _cells(line)
        recorded_name = name.replace("`", "")
        if recorded_name not in figures:
            raise ValueError(f"nothing is recorded of {recorded_name}: python -m simulator.validation.record")
        by_head = figures[recorded_name]
        return _line([name, *(by_head.get(head, cell) for head, cell in zip(heads[1:], cells, strict=True))])

    return f"<!-- validation -->\n{table['head']}{table['rule']}{''.join(map(row, table['rows'].splitlines()))}"


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split(" | ")]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"

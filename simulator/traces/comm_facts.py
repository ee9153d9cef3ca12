"""Facts of communication in a trace: arguments of kernels, and of calls of the host around their launches.

PyTorch's ``record_param_comms`` (torch/csrc/distributed/c10d/ParamCommsUtils.cpp) names its fields as Kineto repeats
them at the kernels of NCCL.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from simulator.traces.classes import parallelism_of
from simulator.traces.trace import TracedCollective

#: Name of a type, as c10 prints it, -> bytes of an element.
_BYTES = {
    "double": 8, "long": 8, "int64": 8, "float64": 8, "float": 4, "int": 4, "int32": 4, "float32": 4, "half": 2,
    "bfloat16": 2, "float16": 2, "short": 2, "char": 1, "byte": 1, "bool": 1, "int8": 1, "uint8": 1,
}  # fmt: skip
#: Types of eight bits have many spellings, such as ``Float8_e4m3fn``.
_EIGHT_BITS = "float8"
#: Ranks that a list may name: c10 cuts long lists, and ends them with dots.
_LISTED = re.compile(r"\[[\d,\s]*\]")


def collective_of(details: Mapping[str, Any], operation: str) -> TracedCollective:
    """Return the bytes and the group of a communication. ``details`` are the arguments of its kernel or call.

    >>> collective_of({"In msg nelems": 4, "Out msg nelems": 8, "dtype": "Float", "Group size": 2}, "all_gather").nbytes
    32.0
    """
    elements = [_number(details.get(f"{side} msg nelems")) for side in ("In", "Out")]
    dtype = str(details.get("dtype", "")).lower()
    each = 1 if dtype.startswith(_EIGHT_BITS) else _BYTES.get(dtype, 0)
    group = str(details.get("Process Group Name", ""))
    text = str(details.get("Process Group Ranks", ""))
    ranks = tuple(int(part) for part in re.findall(r"\d{1,9}", text)) if _LISTED.fullmatch(text) else ()
    size = int(_number(details.get("Group size")))
    kind = parallelism_of(str(details.get("Process Group Description", "")), str(details.get("Collective name", "")))
    return TracedCollective(operation, each * max(elements), group, size or len(ranks), ranks, kind)


def _number(value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return 0.0
    return number if math.isfinite(number) and 0 <= number < 2**63 else 0.0

"""Commands that are run in this process."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.cli.app import main

LEGAL: dict[str, Any] = {
    "model": {"layers": 4, "hidden": 512, "heads": 8, "vocab": 1000},
    "training": {"seq": 256, "global_batch": 8},
    "parallelism": {"tp": 2, "pp": 2, "dp": 2},
    "cluster": "dgx_a100",
}


def command(*arguments: object) -> int:
    """The exit status of one command."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code

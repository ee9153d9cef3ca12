"""All kinds of adapters: what they train, what they keep, and where they are refused."""

from __future__ import annotations

from typing import Any

import pytest

from simulator import models
from simulator.adapters import ADAPTERS
from simulator.config import Workload
from simulator.errors import InputError
from simulator.frameworks import FRAMEWORKS
from simulator.operations.weights import trained
from tests.support import quick
from tests.support.jobs import job

HIDDEN, FFN, RANK = 64, 256, 4
#: Kind -> trained elements beside the attention's projection and the MLP's first product. Each is n x k: A and B have
#: r (n + k) elements, and there is a magnitude for each of n rows.
TRAINED = {
    "lora": RANK * (2 * HIDDEN) + RANK * (FFN + HIDDEN),
    "dora": RANK * (2 * HIDDEN) + RANK * (FFN + HIDDEN) + HIDDEN + FFN,
}


def load(kind: str, **changes: Any) -> Workload:
    work = job(framework="pytorch", parallelism=changes.pop("parallelism", {}))
    work["model"] |= {"hidden": HIDDEN, "heads": 4, "ffn_hidden": FFN, "layers": 2}
    adapters = {"rank": RANK, "targets": ["o", "up"], "method": kind} | changes
    work["training"] |= {"adapters": adapters}
    return quick.load(work)


def test_every_kind_has_a_framework_and_a_count_here() -> None:
    assert set(TRAINED) == set(ADAPTERS) == {kind for one in FRAMEWORKS.values() for kind in one.adapter_kinds}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_kind_trains_its_own_weights_alone(kind: str) -> None:
    """Each has a gradient of its own, whose kernels name its target, and whoever stands before it has one too."""
    part = models.layer(load(kind), number=1)
    assert sum(weight.elements for weight in trained(part.weights)) == TRAINED[kind]
    wgrads = [op.name for op in part.weight_grad]
    assert wgrads
    assert all(name.startswith(("attn.o", "mlp.up")) for name in wgrads)
    assert any(op.name == "attn.qkv dgrad" for op in part.input_grad)


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize(
    ("key", "changes"),
    [("parallelism.tp", {"parallelism": {"tp": 2}}), ("training.adapters.dropout", {"dropout": 0.1})],
)
def test_a_kind_is_refused_what_it_does_not_have(kind: str, key: str, changes: dict[str, Any]) -> None:
    has = {"parallelism.tp": ADAPTERS[kind].splits, "training.adapters.dropout": ADAPTERS[kind].takes_dropout}[key]
    if has:
        load(kind, **changes)
    else:
        with pytest.raises(InputError) as caught:
            load(kind, **changes)
        assert caught.value.key == key

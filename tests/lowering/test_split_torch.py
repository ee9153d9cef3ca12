"""Split backward passes as torch.distributed.pipelining runs them, and what stays between their halves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from calibration.train.layers import Builder, ReplicaPlace, StageModule, loss_of
from simulator.config import Workload, load_workload
from simulator.lowering import build_program
from simulator.models import pass_bytes, passed_bytes, stage_parts
from simulator.operations.weights import elements
from simulator.program import Block, Compute, Step

SEQ, HIDDEN, VOCAB = 512, 128, 512


def workload(layers: int, schedule: str = "interleaved_zb", **parallelism: Any) -> Workload:
    """GPT: its norms are one kernel on a CPU too, so that what is saved is the same."""
    return load_workload(
        {
            "name": "split",
            "model": {"layers": layers, "hidden": HIDDEN, "heads": 2, "vocab": VOCAB, "tied_embeddings": False},
            "training": {
                "seq": SEQ,
                "micro_batch": 1,
                "global_batch": 4,
                "grad_dtype": "bf16",
                "optimizer": {"master_weights": False, "state_dtype": "bf16"},
            },
            "framework": "pytorch",
            "parallelism": {"pp": 2, "vpp": 2, "schedule": schedule, **parallelism},
            "cluster": "hgx_h100_4gpu",
        }
    )


class Alive(TorchDispatchMode):
    """Bytes of what operations have made and nobody has let go of, at most and now, but for the ``known``."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._made = WeakIdKeyDictionary()
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self._known:
                self._made[tensor.untyped_storage()] = tensor.untyped_storage().nbytes()
        self.most = max(self.most, self.now)
        return made

    @property
    def now(self) -> int:
        return sum(self._made.values())


@pytest.mark.parametrize(("stage", "layers"), [(1, 4), (3, 4), pytest.param(1, 12, marks=pytest.mark.slow), (3, 12)])
def test_what_is_alive_between_the_halves_is_what_torch_keeps(stage: int, layers: int) -> None:
    """Torch's own functions on a CPU, every storage counted, but for the weights, the stage's buffers (its input and
    the gradient of its output, which are received) and a percent of statistics. After I: the graph up to the last
    weights with all that it has saved, the gradients of outputs, the gradient of the input, and the stage's output
    until W; of the last stage neither loss nor logits. W leaves nothing but gradients of weights and of the input."""
    work = workload(layers)
    parts = stage_parts(work, stage)
    builder = Builder(work, ReplicaPlace(torch.device("cpu")))
    module = StageModule(builder, stage)
    given, gradient = (torch.randn(SEQ, HIDDEN, dtype=torch.bfloat16) for _ in range(2))
    given.requires_grad_()
    weights = list(module.parameters())
    targets = torch.zeros(1, SEQ, dtype=torch.long)
    with Alive([*weights, given, gradient, targets]) as alive:
        output = module(given)
        last = stage == 3
        ends = loss_of(work, builder.place)(output, targets) if last else output
        forward, split = pass_bytes(parts, "F"), pass_bytes(parts, "I")
        assert alive.now == pytest.approx(forward.alloc, rel=0.01)
        alive.most = 0
        _, groups = stage_backward_input([ends], None if last else [gradient], [given], iter(weights))
        assert alive.most == pytest.approx(forward.alloc + split.alloc + split.workspace, rel=0.04)
        if last:
            del output
        del ends
        held = sum(part.held_bytes for part in parts) + passed_bytes(work)
        assert forward.alloc + split.alloc - split.free == pytest.approx(held)
        assert alive.now == pytest.approx(held, rel=0.01)
        stage_backward_weight(iter(weights), groups)
        del groups
        if not last:
            del output
        made = sum(weight.nbytes for weight in weights) + passed_bytes(work)
        assert alive.now == pytest.approx(made, rel=0.01)


def compute(work: Workload, rank: int) -> list[Step]:
    return [step for step in build_program(work).roles[rank].lanes["compute"] if isinstance(step.op, Block)]


@pytest.mark.parametrize("schedule", ["interleaved_zb", "zb_v", "dualpipe_v"])
def test_the_first_stage_runs_its_backward_whole(schedule: str) -> None:
    """Its tokens have no gradient: where the schedule has W, torch runs all of B, and nothing where it has I."""
    work = workload(4, schedule)
    steps = [step for step in compute(work, 0) if step.stage == 0 and step.phase != "F"]
    assert [step.phase for step in steps] == ["B"] * 4
    assert sorted(step.microbatch for step in steps) == list(range(4))
    for step in steps:
        assert isinstance(step.op, Block)
        assert {op.phase for op in step.op.ops if isinstance(op, Compute)} == {"B", "W"}
    others = {step.phase for rank in range(2) for step in compute(work, rank) if step.stage > 0}
    assert {"I", "W"} <= others


@pytest.mark.parametrize(("schedule", "left"), [("interleaved_zb", (1, 2)), ("zb_v", (1, 1))])
def test_gradients_of_inputs_stay_until_the_step_has_ended(schedule: str, left: tuple[int, int]) -> None:
    """One of b s h numbers per micro-batch and stage whose input came from another rank: in a loop of four stages on
    two ranks stage 2, and stages 1 and 3; in a V stage 3, and stage 1 (stage 2 gets its input from stage 1)."""
    work = workload(4, schedule)
    for rank, count in enumerate(left):
        steps = compute(work, rank)
        passes = [step for step in steps if step.phase in "FBIW"]
        held = sum(step.alloc_bytes - step.free_bytes for step in passes)
        assert steps[-1].label == "optimizer"
        of_weights = steps[-1].free_bytes - 4 * count * passed_bytes(work)
        assert held == pytest.approx(steps[-1].free_bytes)
        assert of_weights == pytest.approx(2 * _parameters(work, rank))


def _parameters(work: Workload, rank: int) -> int:
    stages = work.parallelism.stages_of(rank)
    return sum(elements(part.weights) for stage in stages for part in stage_parts(work, stage))


@pytest.mark.parametrize("keeps_output", [True, False])
def test_a_stage_lacks_the_gradient_of_its_output_alone(keeps_output: bool) -> None:
    """It lies in the buffer that it was received in. All layers of a middle stage but the last keep all of theirs, also
    where equal layers are one object, as nothing is kept that would tell the last from the others."""
    job = workload(16, pp=4, vpp=1, schedule="zb_h1", deallocate_pipeline_outputs=not keeps_output)
    gradients = [
        sum(tensor.name.startswith("output gradient") for tensor in part.held_for_weights)
        for part in stage_parts(job, 1)
    ]
    assert gradients == [gradients[0]] * 3 + [gradients[0] - 1]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_output_gradients_are_summed_before_weight_gradients(stage: int) -> None:
    """Of a GPT's layer (2 norms, qkv, projection, 2 products of the MLP: outputs of 1, 1, 3, 1, 4 and 1 hidden sizes)
    and of its head (norm and projection) each gradient is read and written once more before the weight gradients, as
    448 kernels of the profiled steps of pp2_zbv_h4096_l12_s4k do; a whole backward pass has none of it."""
    for part in stage_parts(workload(4), stage):
        sums = [op for op in part.weight_grad if isinstance(op, Compute) and op.name.endswith(" sum")]
        assert list(part.weight_grad[: len(sums)]) == sums
        wide = (VOCAB // HIDDEN, 1) if part.name == "head" else (1, 4, 1, 1, 3, 1)
        expected = sorted(2.0 * 2 * SEQ * HIDDEN * times for times in wide)
        assert sorted(op.kernel.bytes for op in sums) == expected
        assert not [op for op in part.backward if isinstance(op, Compute) and op.name.endswith(" sum")]

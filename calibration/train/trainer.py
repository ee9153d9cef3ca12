"""One rank's share of a job: its stages, how their gradients meet those of other ranks, and a training step."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.parallel import DistributedDataParallel

from calibration.train.frameworks.tokens import replica_tokens
from calibration.train.layers import DTYPES, Builder, ReplicaPlace, StageModule, loss_of
from calibration.train.limits import SCHEDULES
from calibration.train.optimizer import Adam, accumulate_in_fp32, gradient, local
from calibration.train.process_groups import ProcessGroups
from calibration.train.tensor_parallel import TensorGroup
from simulator.config.workload import Workload

SINGLE = ("gpipe", "1f1b")  # one stage to a rank
MIB = 2**20


class Trainer:
    """Trains a workload on the ranks of ``groups``; `step` is one optimizer step over the global batch."""

    def __init__(self, workload: Workload, groups: ProcessGroups, device: torch.device) -> None:
        layout = workload.parallelism
        self.workload, self.groups, self.device = workload, groups, device
        sharded = bool(layout.sequence_parallel) and layout.tp > 1
        tensor = TensorGroup(groups.tensor, layout.tp, groups.place["tp"], sharded)
        ep_rank = dist.get_rank(groups.expert) if groups.expert else 0
        place = ReplicaPlace(device, tensor, groups.expert, layout.ep, ep_rank)
        builder = Builder(workload, place)
        numbers = layout.stages_of(groups.place["pp"])
        with torch.device(device):
            stages = [StageModule(builder, number) for number in numbers]
        self.loss = loss_of(workload, place)
        self.by_hand: list[list[nn.Parameter]] = []
        # FSDP makes parameters of its own, in the same order.
        drawn = [parameter for stage in stages for parameter in stage.parameters()]
        partial, whole = ({id(one) for one in listed} for listed in (builder.partial, builder.whole))
        self.modules = [self._replicated(stage, builder) for stage in stages]
        #: Averages over replicas are taken by DDP and FSDP; where gradients are summed the loss is scaled instead.
        self.scale = 1.0 if not self._sums else 1.0 / layout.dp
        parameters = [parameter for module in self.modules for parameter in module.parameters()]
        self.partial = [kept for kept, one in zip(parameters, drawn, strict=True) if id(one) in partial]
        counted = [tensor.rank == 0 or id(one) not in whole for one in drawn]
        # A parameter's own mesh may be that of an earlier run, out of DTensor's caches.
        shards = groups.data if layout.zero == 3 else None
        self.optimizer = Adam(workload, parameters, counted, builder.of_experts, groups.model, groups.expert, shards)
        self.pipeline = self._pipeline(numbers) if layout.pp > 1 else None
        #: Of the first stage and of the last, (sequences, seq).
        self.inputs, self.targets = self._data()
        self.last = layout.n_stages - 1 in numbers
        self.first = 0 in numbers
        if device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = True  # what the simulator's fp32 products are, routers' too

    @property
    def _sums(self) -> bool:
        """True where this module's own code sums the gradients of replicas."""
        layout = self.workload.parallelism
        return layout.dp > 1 and layout.zero == 0 and (not layout.overlap.grad_reduce or layout.ep > 1)

    def step(self) -> Tensor:
        """The loss of this rank's replica (0 where the rank has no last stage), before the update."""
        total = self.forward_backward()
        with torch.profiler.record_function("optimizer"):
            self.optimizer.step()
        return total

    def forward_backward(self) -> Tensor:
        """The step up to its gradients, summed over all that share them; the loss as of `step`."""
        for parameter in self.optimizer.parameters:
            if hasattr(parameter, "main_grad"):
                if parameter.main_grad is not None:
                    parameter.main_grad.zero_()
            else:
                parameter.grad = None
        total = self._through_pipeline() if self.pipeline else self._alone()
        if self.partial:
            self._reduce([self.partial], self.groups.tensor)
        self._reduce(self.by_hand, self.groups.data)
        return total

    def close(self) -> None:
        """Give up the communicators, so that the next job finds their memory free."""
        self.modules, self.pipeline = [], None
        self.groups.close()

    def _alone(self) -> Tensor:
        (module,), size = self.modules, self.workload.training.micro_batch
        total = torch.zeros((), device=self.device)
        parts = list(zip(self.inputs.split(size), self.targets.split(size), strict=True))
        for number, (inputs, targets) in enumerate(parts):
            waits = isinstance(module, DistributedDataParallel) and number < len(parts) - 1
            with module.no_sync() if waits else contextlib.nullcontext():
                loss = self.loss(module(inputs), targets)
                (loss * self.scale if self.scale != 1 else loss).backward()
            total += loss.detach()
            del loss
        return total

    def _through_pipeline(self) -> Tensor:
        assert self.pipeline is not None
        arguments = (self.inputs,) if self.first else ()
        target = self.targets if self.last else None
        losses: list[Tensor] = []
        extra: dict[str, Any] = {"losses": losses} if self.last else {}
        if "return_outputs" in inspect.signature(self.pipeline.step).parameters:
            extra["return_outputs"] = False  # else the logits of all micro-batches are kept
        self.pipeline.step(*arguments, target=target, **extra)
        return torch.stack(losses).sum().detach() / self.scale if losses else torch.zeros((), device=self.device)

    def _reduce(self, buckets: Iterable[Sequence[nn.Parameter]], group: dist.ProcessGroup | None) -> None:
        """Sum gradients over ``group``, a bucket's at once."""
        for bucket in buckets:
            grads = [local(grad) for parameter in bucket if (grad := gradient(parameter)) is not None]
            coalesced = dist._coalescing_manager(group, self.device) if self.device.type == "cuda" else None
            with coalesced or contextlib.nullcontext():
                for grad in grads:
                    dist.all_reduce(grad, group=group)

    def _replicated(self, stage: StageModule, builder: Builder) -> nn.Module:
        """``stage`` with what shares its gradients, and with zero 3 its parameters, among data-parallel ranks."""
        layout, training = self.workload.parallelism, self.workload.training
        if training.grad_dtype != training.precision and layout.zero == 0:
            for parameter in stage.parameters():
                accumulate_in_fp32(parameter)
        if layout.dp == 1:
            return stage
        if layout.zero == 3:
            mesh = dist.device_mesh.DeviceMesh.from_group(self.groups.data, self.device.type)
            policy = MixedPrecisionPolicy(DTYPES[training.precision], DTYPES[training.grad_dtype])
            for layer in stage.layers:
                fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=layout.reshard_after_forward)
            fully_shard(stage, mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # needed again at once
            return stage
        experts = {id(parameter) for parameter in builder.of_experts} if layout.ep > 1 else set()
        if not layout.overlap.grad_reduce:
            self.by_hand.append([parameter for parameter in stage.parameters() if id(parameter) not in experts])
            return stage
        ignored = [name for name, parameter in stage.named_parameters() if id(parameter) in experts]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(stage, ignored)
        module = DistributedDataParallel(
            stage,
            process_group=self.groups.data,
            bucket_cap_mb=layout.bucket_bytes / MIB,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
        )
        if self._sums:
            module.register_comm_hook(self.groups.data, _summed)
        return module

    def _pipeline(self, numbers: Sequence[int]) -> Any:
        layout = self.workload.parallelism
        stages = [
            PipelineStage(
                module, number, layout.n_stages, self.device, *self._passed(number), group=self.groups.pipeline
            )
            for module, number in zip(self.modules, numbers, strict=True)
        ]
        schedule: Any = getattr(schedules, SCHEDULES[layout.schedule])
        loss = self.loss if self.scale == 1 else (lambda logits, targets: self.loss(logits, targets) * self.scale)
        scheduled = stages[0] if layout.schedule in SINGLE else stages
        return schedule(scheduled, self.workload.microbatches, loss_fn=loss, scale_grads=False)

    def _passed(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the input and the output of stage ``number``, without values.

        PyTorch would find out by a pass of its own, whose gradients DDP counts as those of a step.
        """
        workload, model = self.workload, self.workload.model
        training, layout = workload.training, workload.parallelism
        t = layout.tp if layout.sequence_parallel else 1
        rows = torch.empty(workload.rank_tokens // t, model.hidden, dtype=DTYPES[training.precision], device="meta")
        tokens = torch.empty(training.micro_batch, training.seq, dtype=torch.long, device="meta")
        words = model.padded_vocab(layout.tp) // (layout.tp if layout.vocab_parallel else 1)
        logits = rows.new_empty(workload.rank_tokens, words)
        last = number == layout.n_stages - 1
        return (rows.requires_grad_() if number else tokens), (logits if last else rows).requires_grad_()

    def _data(self) -> tuple[Tensor, Tensor]:
        """This replica's sequences of the one global batch that every step is trained on, and what follows each
        token."""
        mine = replica_tokens(self.workload, self.groups.place["dp"]).to(self.device)
        return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


def _summed(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's communication hook that adds, and does not average."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


# DDP compares the annotations themselves, which are text in this module.
_summed.__annotations__ |= {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}

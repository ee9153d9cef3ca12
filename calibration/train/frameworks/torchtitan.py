"""torchtitan's own Trainer on its Llama 3, with sizes of the workload and random tokens.

What is replaced is the start of the default process group, which is there already, and the data set.
"""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from calibration.train.frameworks.limits import TITAN_RECIPES, TITAN_SCHEDULES
from calibration.train.frameworks.tokens import LEARNING_RATE, replica_tokens, set_torchrun_variables
from calibration.train.process_groups import ProcessGroups
from simulator.config.model import Model
from simulator.config.workload import Workload

NAME = "of_the_workload"


def _without_data_sets() -> None:
    """Let torchtitan be imported where Hugging Face's ``datasets`` are not installed: random tokens need none."""
    if "datasets" not in sys.modules:
        data, distributed = types.ModuleType("datasets"), types.ModuleType("datasets.distributed")
        for module, names in ((data, ("Dataset", "load_dataset")), (distributed, ("split_dataset_by_node",))):
            for name in names:
                setattr(module, name, object)
        sys.modules |= {"datasets": data, "datasets.distributed": distributed}


def _model_args(model: Model) -> Any:
    """Return torchtitan's sizes of a Llama. Raises `ValueError` where its rule for the width of the MLP cannot."""
    from torchtitan.models.llama3 import TransformerModelArgs

    # hidden = int(2/3 * 4 * dim), times the multiplier, rounded up to a multiple.
    plain = int(2 * 4 * model.hidden / 3)
    return TransformerModelArgs(
        dim=model.hidden,
        n_layers=model.layers,
        n_heads=model.heads,
        n_kv_heads=model.kv_heads,
        vocab_size=model.vocab,
        ffn_dim_multiplier=(model.ffn_hidden - 0.5) / plain,
        multiple_of=model.ffn_hidden,
        rope_theta=500000,
    )


def _config(workload: Workload) -> Any:
    """Return torchtitan's configuration of a workload. Keys without a counterpart there keep torchtitan's defaults."""
    from torchtitan.config import JobConfig

    training, layout, config = workload.training, workload.parallelism, JobConfig()
    config.model.name, config.model.flavor = NAME, NAME
    config.training.seq_len = training.seq
    per_pipeline = training.global_batch // layout.dp
    config.training.local_batch_size = per_pipeline if layout.pp > 1 else training.micro_batch
    config.training.global_batch_size = training.global_batch
    config.training.dtype = "float32" if training.optimizer.master_weights else "bfloat16"
    config.training.max_norm = 1e9 if training.grad_clip is None else training.grad_clip
    config.parallelism.data_parallel_shard_degree = layout.dp
    config.parallelism.tensor_parallel_degree = layout.tp
    config.parallelism.context_parallel_degree = layout.cp
    config.parallelism.pipeline_parallel_degree = layout.pp
    if layout.pp > 1:
        config.parallelism.pipeline_parallel_schedule = TITAN_SCHEDULES[layout.schedule]
        config.parallelism.pipeline_parallel_microbatch_size = training.micro_batch
    config.activation_checkpoint.mode = "full" if training.recompute.granularity == "full" else "none"
    config.compile.enable = workload.framework.compile
    config.optimizer.lr = LEARNING_RATE
    config.optimizer.implementation = training.optimizer.implementation
    _set_fp8(config, workload)
    config.metrics.log_freq = 10**9
    config.job.dump_folder = "/tmp"
    config.comm.trace_buf_size = 0
    return config


def _set_fp8(config: Any, workload: Workload) -> None:
    """Set torchao's recipe for the products of layers, where the workload has one; the head stays as it is."""
    fp8 = workload.training.fp8
    if fp8 is None:
        return
    config.model.converters = ["quantize.linear.float8"]
    chosen = config.quantize.linear.float8
    chosen.recipe_name = TITAN_RECIPES[fp8.recipe]
    chosen.enable_fsdp_float8_all_gather = fp8.gather == "fp8"
    chosen.filter_fqns = ["output"]


class _Batches:
    """A data loader of one batch for each micro-step, from memory of the CPU, again and again."""

    def __init__(self, tokens: Tensor, size: int) -> None:
        self._batches: Sequence[Tensor] = tokens.split(size)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            for tokens in self._batches:
                yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        return None


class TorchtitanTrainer:
    """Trains torchtitan's Llama 3 by its own ``Trainer`` on this rank."""

    def __init__(self, workload: Workload, groups: ProcessGroups, device: torch.device) -> None:
        _without_data_sets()
        set_torchrun_variables(device)
        from torchtitan import train
        from torchtitan.models import llama3
        from torchtitan.protocols import train_spec

        config = _config(workload)
        tokens = replica_tokens(workload, groups.place["dp"])

        def loader(**_: object) -> Any:
            return _Batches(tokens, config.training.local_batch_size)

        spec = llama3.get_train_spec()
        spec.model_args = {NAME: _model_args(workload.model)}
        spec.build_dataloader_fn, spec.build_tokenizer_fn, spec.build_validator_fn = loader, None, None
        train_spec._extra_train_specs[NAME] = spec
        train.dist_utils.init_distributed = lambda *_, **__: dist.get_world_size()
        self._titan = train.Trainer(config)
        self._losses: list[Tensor] = []
        forward_backward = self._titan.forward_backward_step

        def kept(*inputs: Any, **named: Any) -> Tensor:
            loss: Tensor = forward_backward(*inputs, **named)
            self._losses = [loss.detach()]
            return loss

        self._titan.forward_backward_step = kept
        self._data: Iterable[Any] = self._titan.batch_generator(self._titan.dataloader)

    def step(self) -> Tensor:
        """Make one optimizer step; return the last micro-batch's loss."""
        self._titan.step += 1
        self._titan.train_step(self._data)
        return self._losses[0].float().reshape(())

    def close(self) -> None:
        """Free what the run has left behind."""
        self._titan.close()
        del self._titan, self._data
        torch.compiler.reset()
        gc.collect()


TRAINER = TorchtitanTrainer

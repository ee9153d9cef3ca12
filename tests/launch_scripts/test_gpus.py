"""How many GPUs a command runs on: what its launcher says, and Slurm in long and short options."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch_scripts.scripts import COMMAND, script

OPTIONS = COMMAND.partition("pretrain_gpt.py")[2]


@pytest.mark.parametrize(
    ("batch", "launcher", "gpus"),
    [
        # torchrun starts a process per GPU of a node, of which Slurm starts one: 2 x 8.
        ("--nodes=2 --ntasks-per-node=1 --gres=gpu:8", "srun torchrun --nproc_per_node gpu", 16),
        ("--nodes=2 --ntasks-per-node=1 --gres=gpu:8", "srun torchrun --nproc_per_node $SLURM_GPUS_ON_NODE", 16),
        ("-N 4 --gpus-per-node=8 --ntasks-per-node=1", "srun python -m torch.distributed.run --nproc_per_node gpu", 32),
        ("-N 2 -n 2 --gres=nvme:1,gpu:a100:4", "srun accelerate launch --num_processes $WORLD", 8),
        ("--nodes=2 -G 8", "srun torchrun --nproc_per_node gpu", 8),
        ("--nodes=2 --ntasks-per-node=1 --gpus-per-task=h100:4", "srun torchrun --nproc_per_node gpu", 8),
        ("--ntasks=2 --ntasks-per-node=1 --gres=gpu:8", "srun torchrun --nproc_per_node gpu", 16),
        ("--nodes=2 --gres=gpu:8", "srun torchrun --nnodes $N --nproc_per_node 4", 8),
        # Without it a task of Slurm is a process, and each has a GPU.
        ("-N 2 --ntasks-per-node=8", "srun python", 16),
        ("-N2 -n16 --gres=gpu:8", "srun python", 16),
        ("--nodes=2-4 --ntasks-per-node=4  # at least two", "srun python", 8),
        ("--gres=nvme:1", "srun python", None),
        # What the command says counts before lines of the script; letters of mpirun are not Slurm's.
        ("-N 8 --ntasks-per-node=8", "srun -N 2 --ntasks-per-node=4 python", 8),
        ("-N 2 --ntasks-per-node=8", "mpirun -N 4 python", 16),
    ],
)
def test_gpus_of_a_job_of_slurm(batch: str, launcher: str, gpus: int | None, tmp_path: Path) -> None:
    text = f"#!/bin/bash\n#SBATCH {batch}\n##SBATCH --nodes=64\n{launcher} pretrain_gpt.py{OPTIONS}\n"
    assert script(tmp_path, "job.sh", text).gpus == gpus

"""How a worker begins: its device, the other ranks, and the reports to its agent (see `calibration.measure.agent`)."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from calibration.measure.team import FOREVER

Reporter = Callable[[dict[str, object]], None]

#: Linux's prctl(2): the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1


def end_with_parent(agent: int) -> None:
    """End this process with the process number ``agent`` from here on.

    A worker ends with its agent, and an agent with its starter. A worker also ends where the agent is killed while it
    waits for other ranks, or was killed while it imported torch.
    """
    if hasattr(libc := ctypes.CDLL(None), "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent:
        os._exit(1)


def device_of(orders: Mapping[str, Any]) -> torch.device:
    """The rank's GPU, which is made the current one; or the CPU, of which it takes one core."""
    if orders["device"] == "cuda":
        device = torch.device("cuda", int(orders["local_rank"]))
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(1)
    return torch.device("cpu")


def join(orders: Mapping[str, Any]) -> None:
    """Meet the other workers of this generation in the default process group; one worker is a group of its own."""
    alone = int(orders["world"]) == 1
    store = dist.HashStore() if alone else dist.TCPStore(orders["host"], int(orders["port"]), timeout=FOREVER)
    dist.init_process_group(
        "nccl" if orders["device"] == "cuda" else "gloo",
        store=dist.PrefixStore(f"workers/{orders['generation']}", store),
        rank=int(orders["rank"]),
        world_size=int(orders["world"]),
        timeout=FOREVER,
    )


@contextlib.contextmanager
def absent_others(world: int) -> Iterator[None]:
    """Make this process the first of ``world`` ranks whose others are not there.

    Collectives return at once and move nothing (torch's fake process group), so that only what its host takes is real.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def reporting(orders: Mapping[str, Any]) -> Iterator[Reporter]:
    """Sends messages to the agent, of rank 0 alone. A worker that came through ends here: NCCL may wait for ever in its
    destructors."""
    with os.fdopen(int(orders["report_fd"]), "w", buffering=1) as stream:

        def report(message: dict[str, object]) -> None:
            if orders["rank"] == 0:
                print(json.dumps(message), file=stream, flush=True)

        yield report
        report({"done": True})
    os._exit(0)

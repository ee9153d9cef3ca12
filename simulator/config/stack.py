"""A stack: how collectives run on one GPU, fabric and software, in at most eight physical parameters.

A profile of a GPU says how its links carry collectives in as much detail as was measured on it. A stack says it for
a whole installation (NCCL or RCCL version, network plugin, adapters) in numbers that a person can compare, and that a
curve of nccl-tests is enough to fit. `simulator.costs.stack` is the one rule that turns them into transports.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from simulator.config import catalog
from simulator.config.figures import Fraction, NotNegative, Positive
from simulator.config.section import AsTuple, Section, Text, Whole, validated
from simulator.config.transport import ProtocolName
from simulator.errors import InputError
from simulator.input_files import as_mapping, parse_yaml

#: A stack with more would be a table of its measurements.
MAX_PARAMETERS = 8


class Parameters(Section):
    """What is told apart; a parameter that is left out has the value in brackets."""

    start_s: NotNegative
    """starting and ending a collective, whatever its ranks"""
    nvlink_hop_s: NotNegative = 0.0
    """software per hop inside a node with LL; LL128 and simple take NCCL's multiples of it [0]"""
    network_hop_s: NotNegative = 0.0
    """the same between nodes [0]"""
    nvlink_efficiency: Fraction = 1.0
    """share of the NVLinks' line rate that large rings and sends reach [1]"""
    network_efficiency: Fraction = 1.0
    """share of the network cards' line rate that large messages reach [1]"""
    nvls_efficiency: Fraction | None = None
    """share of the NVLinks' line rate where the switches add and multicast [nvlink_efficiency]"""
    ll_fraction: Fraction = 0.5
    """of simple's bandwidth that LL reaches [1/2: half of what it sends is flags]"""
    ll128_most_bytes: Positive | None = None
    """what a link carries at most with LL128, be simple faster or not: where NCCL's tuner leaves it [none]"""
    half_bytes: NotNegative = 0.0
    """a flow of x bytes takes 1 + sqrt(half_bytes / x) times its time at full bandwidth, as its pipeline fills [0]"""
    full_bytes: Positive | None = None
    """flow from which on chunks have their largest size, and filling takes no longer [none]"""
    copy_Bps: Positive = 1e30
    """bytes/s at which a rank handles its own part of the message, which crosses no link [not told apart]"""
    peer_latency_s: NotNegative = 0.0
    """per peer of an all-to-all [0]"""


class Errors(Section):
    """Of times: exp(mean |ln(predicted / measured)|) - 1."""

    n: Annotated[Whole, Field(gt=0)]
    """rows"""
    geometric_mean: NotNegative


class Fitted(Section):
    """What the parameters rest on."""

    n_gpus: Annotated[Whole, Field(gt=1)]
    """the number of GPUs whose rows were fitted"""
    rows: Errors
    """those rows"""
    others: Errors | None = None
    """rows of other numbers of GPUs, which were only predicted"""
    begun: Parameters
    """where the search begins and is held near: what a profile has for the same GPU, a data sheet, or else a first look
    at the curves, those of other numbers of GPUs among them"""


class Stack(Section):
    """A versioned set of parameters. Raises `InputError` where it sets more than `MAX_PARAMETERS`."""

    schema_version: Literal[1]
    name: Text
    gpu: Text
    """name of the GPU, as cluster files give it"""
    fabric: Text
    """what joins GPUs and nodes, in words"""
    software: Text
    """NCCL, RCCL, plugins and their versions, as far as the source says"""
    source: Text
    """where the measurements are from"""
    note: Text = ""
    protocols: Annotated[tuple[ProtocolName, ...], AsTuple] = ("ll", "ll128", "simple")
    """those of NCCL's that the software uses"""
    pat: bool = True
    """whether it chooses PAT, as NCCL does from 2.23 on, and RCCL does not"""
    parameters: Parameters
    fitted: Fitted | None = None

    @model_validator(mode="after")
    def _few(self) -> Self:
        given = [name for name in Parameters.model_fields if name in self.parameters.model_fields_set]
        if len(given) > MAX_PARAMETERS:
            raise InputError(
                "sets too many", key="parameters", found=", ".join(given), allowed=f"at most {MAX_PARAMETERS}"
            )
        if "simple" not in self.protocols:
            raise InputError("lacks simple", key="protocols", found=", ".join(self.protocols))
        return self


def load_stack(
    reference: str | Path, *, base: Path | None = None, file: object = None, key: str | None = None
) -> Stack:
    """A stack by shipped name or by path; ``base``, ``file`` and ``key`` say where the reference stands.

    Raises `InputError`.
    """
    return catalog.load("stack", reference, _parsed, base=base, file=file, key=key)


@lru_cache(maxsize=64)
def _parsed(text: str, path: Path) -> Stack:
    return validated(Stack, as_mapping(parse_yaml(text, path), path), path)


def check_stack(stack: Stack, gpu: str, *, file: object = None, key: str | None = None) -> None:
    """Raise `InputError` where ``stack`` is not one of the cluster's ``gpu``; ``file`` and ``key`` chose it."""
    catalog.check_gpu("stack", stack.name, stack.gpu, gpu, lambda name: load_stack(name).gpu, file=file, key=key)

"""A program as text, one line per op, and back: for golden files, errors and curious people.

    program name=tiny
    block 0 name="F layer"
      compute fc1 F matmul m=4 n=8 k=4
      comm "tp.all_reduce mlp" all_reduce nbytes=32 axis=tp purpose=tp
      beside 1
        comm "cp.send_recv kv" send_recv nbytes=16 axis=cp purpose=cp
        compute attn F attention batch=1 heads=2 kv_heads=1 q_len=4 kv_len=4 head_dim=8
    role stage0 ranks=0-1
      lane compute
        step 0F0 block=0 phase=F microbatch=0 stage=0
    group tp 0,1
    servers 4,5

Fields at their defaults are left out. Those of a compute line stand before its kernel, as in ``compute read O
host_waits=True memory ..``. Behind the lanes of a role, ``later LANE`` stands before the communication that extensions
may bring to a lane.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from typing import Any

from simulator.program.kernels import KERNELS, Kernel
from simulator.program.ops import Batch, Beside, Block, Comm, Compute
from simulator.program.program import Program, Role
from simulator.program.step import Step

#: Fields that are written as numbers joined by commas.
_NUMBERS = ("tokens", "send_shares", "receive_shares")
_KERNEL_NAME = {kernel: name for name, kernel in KERNELS.items()}


def to_text(program: Program) -> str:
    """Return ``program`` in the text form; `text_reader.from_text` gives it back."""
    blocks: dict[int, Block] = {}
    for role in program.roles:
        for _, _, step in role.steps():
            if isinstance(step.op, Block):
                blocks.setdefault(id(step.op), step.op)
    number = {key: index for index, key in enumerate(blocks)}
    lines = [f"program name={shlex.quote(program.name)}"]
    for index, block in enumerate(blocks.values()):
        lines.append(f"block {index} name={shlex.quote(block.name)}")
        for op in block.ops:
            if isinstance(op, Beside):
                lines.append(f"  beside {len(op.kernels)}")
                lines.append(f"    {_op(op.comm)}")
                lines += [f"    {_op(kernel)}" for kernel in op.kernels]
            else:
                lines.append(f"  {_op(op)}")
    for index, role in enumerate(program.roles):
        ranks = [rank for rank, played in enumerate(program.role_of) if played == index]
        lines.append(f"role {shlex.quote(role.name)} ranks={_ranges(ranks)}")
        lines += _lanes(role, number)
    for axis, groups in program.groups.items():
        lines += [f"group {shlex.quote(axis)} {','.join(map(str, group))}" for group in groups]
    if program.servers:
        lines.append(f"servers {','.join(map(str, program.servers))}")
    return "\n".join(lines) + "\n"


def kernel_to_text(kernel: Kernel) -> str:
    """Return one kernel in the text form; `text_reader.kernel_from_text` gives it back.

    >>> from simulator.program.kernels import Matmul
    >>> kernel_to_text(Matmul(4, 8, 2, role="wgrad"))
    'matmul m=4 n=8 k=2 role=wgrad'
    """
    return f"{_KERNEL_NAME[type(kernel)]}{_values(kernel, ())}"


def _op(op: Compute | Comm) -> str:
    if isinstance(op, Comm):
        return f"comm {shlex.quote(op.name)} {op.op}{_values(op, ('name', 'op'))}"
    values = _values(op, ("name", "phase", "kernel"))
    return f"compute {shlex.quote(op.name)} {op.phase}{values} {kernel_to_text(op.kernel)}"


def _lanes(role: Role, number: dict[int, int]) -> Iterator[str]:
    for lane, steps in role.lanes.items():
        yield f"  lane {shlex.quote(lane)}"
        for step in steps:
            yield from _step(step, number)
    for lane, comms in role.later.items():
        yield f"  later {shlex.quote(lane)}"
        yield from (f"    {_op(comm)}" for comm in comms)


def _step(step: Step, number: dict[int, int]) -> Iterator[str]:
    values = _values(step, ("label", "op"))
    match step.op:
        case Block():
            yield f"    step {shlex.quote(step.label)} block={number[id(step.op)]}{values}"
        case Comm():
            yield f"    step {shlex.quote(step.label)}{values}"
            yield f"      {_op(step.op)}"
        case Batch():
            yield f"    step {shlex.quote(step.label)} batch={len(step.op.comms)}{values}"
            yield from (f"      {_op(comm)}" for comm in step.op.comms)


def _values(item: Any, left_out: Sequence[str]) -> str:
    parts = []
    for field in fields(item):
        value = getattr(item, field.name)
        if field.name in left_out or (field.default is not MISSING and value == field.default):
            continue
        if field.name in _NUMBERS:
            parts.append(f" {field.name}={','.join(map(repr, value))}")
        elif isinstance(value, tuple):
            parts += [f" {field.name}={shlex.quote(entry)}" for entry in value]
        else:
            parts.append(f" {field.name}={shlex.quote(value) if isinstance(value, str) else repr(value)}")
    return "".join(parts)


def _ranges(ranks: Sequence[int]) -> str:
    """Write ascending ranks in short: 0-3,8."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)

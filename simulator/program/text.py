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

Fields at their defaults are left out.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from typing import Any, cast

from simulator.program.kernels import KERNELS, Kernel
from simulator.program.ops import Batch, Beside, Block, Comm, Compute, Program, ProgramError, Role, Step

#: Fields that are written as numbers joined by commas.
_NUMBERS = ("tokens", "send_shares", "receive_shares")
_KERNEL_NAME = {kernel: name for name, kernel in KERNELS.items()}


def to_text(program: Program) -> str:
    """``program`` in the text form; `from_text` gives it back."""
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
        for lane, steps in role.lanes.items():
            lines.append(f"  lane {shlex.quote(lane)}")
            for step in steps:
                lines += _step(step, number)
    for axis, groups in program.groups.items():
        lines += [f"group {shlex.quote(axis)} {','.join(map(str, group))}" for group in groups]
    if program.servers:
        lines.append(f"servers {','.join(map(str, program.servers))}")
    return "\n".join(lines) + "\n"


def _op(op: Compute | Comm) -> str:
    if isinstance(op, Comm):
        return f"comm {shlex.quote(op.name)} {op.op}{_values(op, ('name', 'op'))}"
    kernel = op.kernel
    return f"compute {shlex.quote(op.name)} {op.phase} {_KERNEL_NAME[type(kernel)]}{_values(kernel, ())}"


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
    """Ascending ranks in short: 0-3,8."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def from_text(text: str) -> Program:
    """The program that ``text`` describes, validated. Raises `ProgramError` naming the line."""
    reader = _Reader()
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        where = f"line {number}: cannot read {line.strip()!r}"
        with _naming(where):
            reader.line(shlex.split(line), where)
    program = reader.program()
    program.validate()
    return program


@contextmanager
def _naming(where: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, ValueError, IndexError, TypeError) as error:
        raise ProgramError(f"{where}: {error}") from None


class _Reader:
    def __init__(self) -> None:
        self.name = "program"
        self.blocks: dict[int, tuple[str, list[Compute | Comm | Beside]]] = {}
        self.roles: list[tuple[str, list[int], dict[str, list[_StepLine]]]] = []
        self.groups: dict[str, list[tuple[int, ...]]] = {}
        self.servers: tuple[int, ...] = ()
        self._role_of: dict[int, str] = {}
        self._ops: list[Any] | None = None
        self._beside: _BesideLines | None = None

    def line(self, words: list[str], where: str) -> None:
        kind, *rest = words
        if self._beside is not None and kind not in ("comm", "compute"):
            raise ValueError("the communication and kernels of the 'beside' before it are not complete")
        match kind:
            case "program":
                self.name = _pairs(rest)["name"][0]
            case "block":
                self._ops = []
                _add(self.blocks, int(rest[0]), (_pairs(rest[1:])["name"][0], self._ops), "block")
            case "role":
                ranks = _expand(_pairs(rest[1:])["ranks"][0])
                for rank in ranks:
                    _add(self._role_of, rank, rest[0], "rank")
                self.roles.append((rest[0], ranks, {}))
            case "lane":
                _add(self._last_role(), rest[0], [], "lane")
            case "step":
                entry = _StepLine(rest[0], _pairs(rest[1:]), where)
                if not self._last_role():
                    raise ValueError("it stands in no lane")
                list(self._last_role().values())[-1].append(entry)
                self._ops = entry.comms
            case "beside":
                self._beside = _BesideLines(int(rest[0]))
            case "compute":
                self._add_op(Compute(rest[0], _kernel(rest[2], rest[3:]), rest[1]))
            case "comm":
                self._add_op(_build(Comm, rest[2:], name=rest[0], op=rest[1]))
            case "group":
                self.groups.setdefault(rest[0], []).append(tuple(map(int, rest[1].split(","))))
            case "servers":
                if self.servers:
                    raise ValueError("servers stand there twice")
                self.servers = tuple(map(int, rest[0].split(",")))
            case _:
                raise ValueError(f"unknown word {kind!r}")

    def _last_role(self) -> dict[str, list[_StepLine]]:
        if not self.roles:
            raise ValueError("it stands in no role")
        return self.roles[-1][2]

    def _add_op(self, op: Compute | Comm) -> None:
        if self._ops is None:
            raise ValueError("it stands in no block or step")
        if self._beside is None:
            self._ops.append(op)
            return
        whole = self._beside.add(op)
        if whole is not None:
            self._beside = None
            self._ops.append(whole)

    def program(self) -> Program:
        if self._beside is not None:
            raise ProgramError("the last 'beside' is not complete")
        blocks = {number: Block(name, tuple(ops)) for number, (name, ops) in self.blocks.items()}
        roles = tuple(
            Role(name, {lane: tuple(step.build(blocks) for step in steps) for lane, steps in lanes.items()})
            for name, _, lanes in self.roles
        )
        role_of = {rank: index for index, (_, ranks, _) in enumerate(self.roles) for rank in ranks}
        if sorted(role_of) != list(range(len(role_of))):
            raise ProgramError("roles must cover ranks 0, 1, 2 ... without a gap")
        return Program(
            roles,
            tuple(role_of[rank] for rank in range(len(role_of))),
            {axis: tuple(groups) for axis, groups in self.groups.items()},
            self.name,
            self.servers,
        )


class _BesideLines:
    """The comm line and the ``n_kernels`` compute lines that follow ``beside``."""

    def __init__(self, n_kernels: int) -> None:
        self.n_kernels = n_kernels
        self.ops: list[Compute | Comm] = []

    def add(self, op: Compute | Comm) -> Beside | None:
        """Take the next line; the whole once it is complete."""
        if isinstance(op, Comm) != (not self.ops):
            raise ValueError("'beside' is followed by one communication, then by its kernels")
        self.ops.append(op)
        if len(self.ops) <= self.n_kernels:
            return None
        comm, *kernels = self.ops
        return Beside(cast(Comm, comm), tuple(cast(list[Compute], kernels)))


class _StepLine:
    """A step and the comm lines that follow it."""

    def __init__(self, label: str, pairs: dict[str, list[str]], where: str) -> None:
        self.label = label
        self.pairs = pairs
        self.where = where
        self.comms: list[Any] = []

    def build(self, blocks: dict[int, Block]) -> Step:
        with _naming(self.where):
            pairs = dict(self.pairs)
            op = self._op(pairs, blocks)
            after = tuple(pairs.pop("after", ()))
            words = [f"{key}={values[0]}" for key, values in pairs.items()]
            step: Step = _build(Step, words, label=self.label, op=op, after=after)
        return step

    def _op(self, pairs: dict[str, list[str]], blocks: dict[int, Block]) -> Block | Comm | Batch:
        """What it runs; takes ``block`` and ``batch`` out of ``pairs``."""
        if any(not isinstance(comm, Comm) for comm in self.comms):
            raise ValueError("kernels stand in blocks")
        block, batch = (int(pairs.pop(key, ["-1"])[0]) for key in ("block", "batch"))
        if block >= 0 and block not in blocks:
            raise ValueError(f"there is no block {block}")
        expected = 0 if block >= 0 else max(batch, 1)
        if len(self.comms) != expected:
            raise ValueError(f"{len(self.comms)} comm lines follow, not {expected}")
        if block >= 0:
            return blocks[block]
        return Batch(tuple(self.comms)) if batch >= 0 else cast(Comm, self.comms[0])


def _add(known: dict[Any, Any], key: object, value: object, what: str) -> None:
    if key in known:
        raise ValueError(f"{what} {key} stands there twice")
    known[key] = value


def _kernel(name: str, words: list[str]) -> Kernel:
    if name not in KERNELS:
        raise ValueError(f"no kernel {name!r}; there are {', '.join(KERNELS)}")
    kernel: Kernel = _build(KERNELS[name], words)
    return kernel


def _build(kind: type[Any], words: list[str], **given: Any) -> Any:
    annotation = {field.name: str(field.type) for field in fields(kind)}
    convert: dict[str, Callable[[str], Any]] = {
        "int": int,
        "float": float,
        "bool": lambda word: {"True": True, "False": False}[word],
        "str": str,
        "tuple[int, ...]": lambda word: tuple(map(int, word.split(","))),
        "tuple[float, ...]": lambda word: tuple(map(float, word.split(","))),
    }
    pairs = _pairs(words)
    for key in pairs:
        if key not in annotation or key in given:
            raise ValueError(
                f"no field {key!r}; there are {', '.join(name for name in annotation if name not in given)}"
            )
    values = {key: convert[annotation[key]](entry[0]) for key, entry in pairs.items()}
    return kind(**given, **values)


def _pairs(words: list[str]) -> dict[str, list[str]]:
    pairs: dict[str, list[str]] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"{word!r} is not KEY=VALUE")
        pairs.setdefault(key, []).append(value)
    return pairs


def _expand(text: str) -> list[int]:
    ranks: list[int] = []
    for part in filter(None, text.split(",")):
        low, _, high = part.partition("-")
        ranks += range(int(low), int(high or low) + 1)
    return ranks

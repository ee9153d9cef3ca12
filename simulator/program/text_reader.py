"""Reads the text form of a program (see `simulator.program.text`)."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, TypeVar, cast

from simulator.program.kernels import KERNELS, Kernel
from simulator.program.ops import Batch, Beside, Block, Collective, Comm, Compute
from simulator.program.program import Program, Role
from simulator.program.step import Step
from simulator.program.validation import COMM_TYPES, ProgramError, validate
from simulator.program.vocabulary import GraphPlace, Purpose, StepPhase

_Word = TypeVar("_Word", bound=StrEnum)


def from_text(text: str) -> Program:
    """Return the program that ``text`` describes, validated. Raises `ProgramError` naming the line."""
    reader = _Reader()
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        where = f"line {number}: cannot read {line.strip()!r}"
        with _naming(where):
            reader.line(shlex.split(line), where)
    program = reader.program()
    validate(program)
    return program


@contextmanager
def _naming(where: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, ValueError, IndexError, TypeError) as error:
        raise ProgramError(f"{where}: {error}") from None


class _Reader:
    """Lines read so far."""

    def __init__(self) -> None:
        self.name = "program"
        self.blocks: dict[int, tuple[str, list[Any]]] = {}
        self.roles: list[_RoleLines] = []
        self.groups: dict[str, list[tuple[int, ...]]] = {}
        self.servers: tuple[int, ...] = ()
        self._role_of: dict[int, str] = {}
        self._ops: list[Any] | None = None
        self._beside: _BesideLines | None = None
        self._where = ""

    def line(self, words: list[str], where: str) -> None:
        """Take one line, split into words."""
        kind, *rest = words
        if self._beside is not None and kind not in ("comm", "compute"):
            raise ValueError("the communication and kernels of the 'beside' before it are not complete")
        if kind not in _LINES:
            raise ValueError(f"unknown word {kind!r}")
        self._where = where
        _LINES[kind](self, rest)

    def _program(self, words: list[str]) -> None:
        self.name = _pairs(words)["name"][0]

    def _block(self, words: list[str]) -> None:
        self._ops = []
        _add(self.blocks, int(words[0]), (_pairs(words[1:])["name"][0], self._ops), "block")

    def _role(self, words: list[str]) -> None:
        ranks = _expand(_pairs(words[1:])["ranks"][0])
        for rank in ranks:
            _add(self._role_of, rank, words[0], "rank")
        self.roles.append(_RoleLines(words[0], ranks, {}, {}))

    def _lane(self, words: list[str]) -> None:
        _add(self._last_role().lanes, words[0], [], "lane")

    def _later(self, words: list[str]) -> None:
        self._ops = []
        _add(self._last_role().later, words[0], (self._where, self._ops), "later")

    def _step(self, words: list[str]) -> None:
        step = _StepLines(words[0], _pairs(words[1:]), self._where)
        lanes = self._last_role().lanes
        if not lanes:
            raise ValueError("it stands in no lane")
        list(lanes.values())[-1].append(step)
        self._ops = step.comms

    def _begin_beside(self, words: list[str]) -> None:
        self._beside = _BesideLines(int(words[0]))

    def _compute(self, words: list[str]) -> None:
        name, phase, *rest = words
        n_fields = next((index for index, word in enumerate(rest) if "=" not in word), len(rest))
        kernel = _kernel(rest[n_fields], rest[n_fields + 1 :])
        self._add_op(_build(Compute, rest[:n_fields], name=name, kernel=kernel, phase=_word(StepPhase, phase)))

    def _comm(self, words: list[str]) -> None:
        self._add_op(_comm(words[0], words[1], words[2:]))

    def _group(self, words: list[str]) -> None:
        self.groups.setdefault(words[0], []).append(tuple(map(int, words[1].split(","))))

    def _servers(self, words: list[str]) -> None:
        if self.servers:
            raise ValueError("servers stand there twice")
        self.servers = tuple(map(int, words[0].split(",")))

    def _last_role(self) -> _RoleLines:
        if not self.roles:
            raise ValueError("it stands in no role")
        return self.roles[-1]

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
        """Return the program of all lines."""
        if self._beside is not None:
            raise ProgramError("the last 'beside' is not complete")
        blocks = {number: Block(name, tuple(ops)) for number, (name, ops) in self.blocks.items()}
        roles = tuple(role.build(blocks) for role in self.roles)
        role_of = {rank: index for index, role in enumerate(self.roles) for rank in role.ranks}
        if sorted(role_of) != list(range(len(role_of))):
            raise ProgramError("roles must cover ranks 0, 1, 2 ... without a gap")
        return Program(
            roles,
            tuple(role_of[rank] for rank in range(len(role_of))),
            {axis: tuple(groups) for axis, groups in self.groups.items()},
            self.name,
            self.servers,
        )


#: First word of a line -> the method that takes the words after it.
_LINES: dict[str, Callable[[_Reader, list[str]], None]] = {
    "program": _Reader._program,
    "block": _Reader._block,
    "role": _Reader._role,
    "lane": _Reader._lane,
    "later": _Reader._later,
    "step": _Reader._step,
    "beside": _Reader._begin_beside,
    "compute": _Reader._compute,
    "comm": _Reader._comm,
    "group": _Reader._group,
    "servers": _Reader._servers,
}


@dataclass(frozen=True)
class _RoleLines:
    """A role, the lanes that follow it, and the communication that extensions may bring to these."""

    name: str
    ranks: list[int]
    lanes: dict[str, list[_StepLines]]
    later: dict[str, tuple[str, list[Any]]]

    def build(self, blocks: dict[int, Block]) -> Role:
        """Return the role."""
        for where, ops in self.later.values():
            with _naming(where):
                if any(not isinstance(op, Comm) for op in ops):
                    raise ValueError("communication follows; kernels stand in blocks")
        lanes = {lane: tuple(step.build(blocks) for step in steps) for lane, steps in self.lanes.items()}
        return Role(self.name, lanes, {lane: tuple(comms) for lane, (_, comms) in self.later.items()})


class _BesideLines:
    """The comm line and the ``n_kernels`` compute lines that follow ``beside``."""

    def __init__(self, n_kernels: int) -> None:
        self.n_kernels = n_kernels
        self.ops: list[Compute | Comm] = []

    def add(self, op: Compute | Comm) -> Beside | None:
        """Take the next line; return the whole once it is complete."""
        if isinstance(op, Comm) != (not self.ops):
            raise ValueError("'beside' is followed by one communication, then by its kernels")
        self.ops.append(op)
        if len(self.ops) <= self.n_kernels:
            return None
        comm, *kernels = self.ops
        return Beside(cast(Collective, comm), tuple(cast(list[Compute], kernels)))


class _StepLines:
    """A step and the comm lines that follow it."""

    def __init__(self, label: str, pairs: dict[str, list[str]], where: str) -> None:
        self.label = label
        self.pairs = pairs
        self.where = where
        self.comms: list[Any] = []

    def build(self, blocks: dict[int, Block]) -> Step:
        """Return the step."""
        with _naming(self.where):
            pairs = dict(self.pairs)
            op = self._op(pairs, blocks)
            after = tuple(pairs.pop("after", ()))
            words = [f"{key}={values[0]}" for key, values in pairs.items()]
            step: Step = _build(Step, words, label=self.label, op=op, after=after)
        return step

    def _op(self, pairs: dict[str, list[str]], blocks: dict[int, Block]) -> Block | Comm | Batch:
        """Return its operation; takes ``block`` and ``batch`` out of ``pairs``."""
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


def _add(table: dict[Any, Any], key: object, value: object, what: str) -> None:
    if key in table:
        raise ValueError(f"{what} {key} stands there twice")
    table[key] = value


def kernel_from_text(text: str) -> Kernel:
    """Return the kernel that ``text`` describes. Raises `ProgramError` where it is none.

    >>> kernel_from_text("matmul m=4 n=8 k=2").flops
    128.0
    """
    with _naming(f"cannot read {text!r}"):
        name, *words = shlex.split(text)
        return _kernel(name, words)


def _kernel(name: str, words: list[str]) -> Kernel:
    if name not in KERNELS:
        raise ValueError(f"no kernel {name!r}; there are {', '.join(KERNELS)}")
    kernel: Kernel = _build(KERNELS[name], words)
    return kernel


def _comm(name: str, op: str, words: list[str]) -> Comm:
    kinds = {str(kind): kind for kind in COMM_TYPES}
    if op not in kinds:
        raise ValueError(f"no operation {op!r}; there are {', '.join(kinds)}")
    comm: Comm = _build(COMM_TYPES[kinds[op]], words, name=name, op=kinds[op])
    return comm


def _word(kind: type[_Word], text: str) -> _Word:
    words = {word.value: word for word in kind}
    if text not in words:
        raise ValueError(f"{text!r} is none of {', '.join(words)}")
    return words[text]


#: Annotation of a field -> its value from text.
_FROM_TEXT: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "bool": lambda text: {"True": True, "False": False}[text],
    "str": str,
    "tuple[int, ...]": lambda text: tuple(map(int, text.split(","))),
    "tuple[float, ...]": lambda text: tuple(map(float, text.split(","))),
    "StepPhase": lambda text: _word(StepPhase, text),
    "Purpose": lambda text: _word(Purpose, text),
    "GraphPlace": lambda text: _word(GraphPlace, text),
}


def _build(kind: type[Any], words: list[str], **values: Any) -> Any:
    """Build a dataclass from KEY=VALUE words, and from ``values`` that are read already."""
    annotation = {field.name: str(field.type) for field in fields(kind)}
    pairs = _pairs(words)
    for key in pairs:
        if key not in annotation or key in values:
            raise ValueError(
                f"no field {key!r}; there are {', '.join(name for name in annotation if name not in values)}"
            )
    values |= {key: _FROM_TEXT[annotation[key]](entry[0]) for key, entry in pairs.items()}
    settable = {field.name for field in fields(kind) if field.init}
    return kind(**{name: value for name, value in values.items() if name in settable})


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

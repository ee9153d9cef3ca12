"""Values that a Python file gives to calls and attributes, read from its syntax. Nothing of it is run.

Straight code is followed: assignments, functions of the file, conditions on values that are there. A call of anything
else becomes a `CallValue` with its arguments, to which attributes may be assigned. Loops are not followed.
"""

from __future__ import annotations

import ast
import enum
import operator
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simulator.errors import InputError
from simulator.launch_scripts.script import Unsaid

#: Calls that are followed one inside the other, and calls of a file, at most.
_MOST_DEEP, _MOST_CALLS = 40, 5000
#: Signs of a number or text that is computed with, at most.
_MOST_SIGNS = 1000
#: Methods whose result is what the command line says, which is not in the file.
_OF_COMMAND_LINE = ("parse_args", "parse_known_args")
#: Calls that hold the arguments of another, whose name comes first.
_WRAPPERS = ("Config", "Partial", "partial")
_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Gt: operator.gt,
    ast.Lt: operator.lt,
    ast.GtE: operator.ge,
    ast.LtE: operator.le,
}


class _StatementEnd(enum.Enum):
    """How statements end that return nothing: they go on to the next ones."""

    GOES_ON = enum.auto()


@dataclass(frozen=True)
class OutsideName:
    """Name that comes from another module, such as ``torch.bfloat16``."""

    text: str


@dataclass
class CallValue:
    """Call of something outside the file: its dotted name, arguments by position and by name.

    Attributes that are assigned later stand among those by name.
    """

    name: str
    arguments: list[Any] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """True where it has neither name nor values: an attribute that was only looked at."""
        return not (self.name or self.arguments or self.values)

    def enter(self, name: str) -> Any:
        """Return an attribute. One that nothing has said is entered as an empty call, whose attributes may follow."""
        return self.values.setdefault(name, CallValue(""))

    def flattened(self, section: str = "") -> dict[str, Any]:
        """Return attributes by dotted names; a call among them by its own name, where it has one."""
        flat: dict[str, Any] = {}
        for name, value in self.values.items():
            key = f"{section}{name}"
            if isinstance(value, CallValue):
                if value.name:
                    flat[key] = OutsideName(value.name)
                flat |= value.flattened(f"{key}.")
            else:
                flat[key] = value
        return flat


@dataclass
class PythonFile:
    """Calls of outside names that a file's code makes, in order, and the functions of the file by name.

    ``skipped``: statements that were not followed.
    """

    calls: list[CallValue] = field(default_factory=list)
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    _names: dict[str, Any] = field(default_factory=dict)
    _depth: int = 0

    def call(self, name: str) -> Any:
        """Return what a function of the file returns by its defaults."""
        return self._run(self.functions[name], [], {})

    def follow(self, body: list[ast.stmt], names: dict[str, Any]) -> Any:
        """Follow statements, with the names that they see; return what they return, or else `_StatementEnd.GOES_ON`."""
        for statement in body:
            if isinstance(statement, ast.Return):
                return None if statement.value is None else self._value(statement.value, names)
            if isinstance(statement, ast.If | ast.With):
                inside = self._branch(statement, names) if isinstance(statement, ast.If) else statement.body
                if (returned := self.follow(inside, names)) is not _StatementEnd.GOES_ON:
                    return returned
            else:
                self._statement(statement, names)
        return _StatementEnd.GOES_ON

    def _statement(self, statement: ast.stmt, names: dict[str, Any]) -> None:
        """Follow a statement without others inside."""
        match statement:
            case ast.FunctionDef():
                self.functions[statement.name] = statement
            case ast.Import() | ast.ImportFrom():
                _import(statement, names)
            case ast.Assign(targets=targets, value=value):
                result = self._value(value, names)
                outcomes = [self._assign(target, result, names) for target in targets]
                if not all(outcomes):
                    self._skip(statement)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                if not self._assign(target, self._value(value, names), names):
                    self._skip(statement)
            case ast.AugAssign():
                self._change(statement, names)
            case ast.Expr(value=value):
                self._value(value, names)
            case ast.AnnAssign() | ast.Assert() | ast.Pass():
                pass  # which give no value to anything
            case _:
                self._skip(statement)

    def _skip(self, statement: ast.stmt) -> None:
        """Note a statement that is not followed, by its first line."""
        text = textwrap.shorten(ast.unparse(statement).splitlines()[0].rstrip(":"), 80)
        self.skipped.append(f"line {statement.lineno}: {text}")

    def _change(self, statement: ast.AugAssign, names: dict[str, Any]) -> None:
        """Follow ``x += 1`` and its like; where the result is not in the file, ``x`` is `Unsaid` from then on."""
        result: Any = Unsaid(ast.unparse(statement))
        if compute := _OPERATORS.get(type(statement.op)):
            before, by = self._value(statement.target, names), self._value(statement.value, names)
            result = _computed(compute, before, by, statement)
        if not self._assign(statement.target, result, names) or isinstance(result, Unsaid):
            self._skip(statement)

    def _branch(self, statement: ast.If, names: dict[str, Any]) -> list[ast.stmt]:
        """Return the branch that a condition takes; none where its value is not in the file."""
        condition = self._value(statement.test, names)
        if _is_open(condition):
            self._skip(statement)
            return []
        return statement.body if condition else statement.orelse

    def _assign(self, target: ast.expr, value: Any, names: dict[str, Any]) -> bool:
        """Give a value to a name, an attribute or several; return whether all of them could take it."""
        if isinstance(target, ast.Name):
            names[target.id] = value
            return True
        if isinstance(target, ast.Attribute) and isinstance(base := self._value(target.value, names), CallValue):
            base.values[target.attr] = _passed(value, ast.unparse(target))
            return True
        if isinstance(target, ast.Tuple | ast.List) and isinstance(value, list) and len(value) == len(target.elts):
            outcomes = [self._assign(inner, one, names) for inner, one in zip(target.elts, value, strict=True)]
            return all(outcomes)
        return False

    def _value(self, node: ast.expr, names: dict[str, Any]) -> Any:
        """Return the value of an expression; `Unsaid` where it is not in the file."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return names[name] if name in names else self._names.get(name, Unsaid(name))
            case ast.Attribute(value=inner, attr=attribute):
                return _attribute(self._value(inner, names), attribute, node)
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return [self._value(part, names) for part in parts]
            case ast.Dict():
                return self._dict(node, names)
            case ast.Call():
                return self._call(node, names)
            case ast.UnaryOp(op=sign, operand=inner):
                return _unary(sign, self._value(inner, names), node)
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
                return _computed(_OPERATORS[type(sign)], self._value(left, names), self._value(right, names), node)
            case ast.Compare(left=left, ops=[sign], comparators=[right]) if type(sign) in _COMPARISONS:
                return _computed(_COMPARISONS[type(sign)], self._value(left, names), self._value(right, names), node)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                condition = self._value(test, names)
                return (
                    Unsaid(ast.unparse(node))
                    if _is_open(condition)
                    else self._value(body if condition else orelse, names)
                )
            case ast.BoolOp(op=ast.Or(), values=parts):
                values = [self._value(part, names) for part in parts]
                return next((value for value in values if _is_open(value) or value), values[-1])
        return Unsaid(ast.unparse(node))

    def _dict(self, node: ast.Dict, names: dict[str, Any]) -> Any:
        result: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            inner = self._value(value, names)
            if key is not None:
                name = self._value(key, names)
                if isinstance(name, str | int):
                    result[name] = inner
            elif isinstance(inner, dict):
                result |= inner
        return result

    def _call(self, node: ast.Call, names: dict[str, Any]) -> Any:
        """Return the value of a call: a function of the file is followed; of a `CallValue`, its methods are itself."""
        arguments = [self._value(part, names) for part in node.args if not isinstance(part, ast.Starred)]
        values: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self._value(keyword.value, names)
            if keyword.arg is not None:
                values[keyword.arg] = value
            elif isinstance(value, dict):
                values |= value
        if isinstance(node.func, ast.Name) and node.func.id in self.functions:
            return self._run(self.functions[node.func.id], arguments, values)
        if isinstance(node.func, ast.Attribute):
            base = self._value(node.func.value, names)
            if isinstance(base, CallValue):
                return Unsaid(ast.unparse(node)) if node.func.attr in _OF_COMMAND_LINE else base
            if isinstance(base, dict) and node.func.attr == "get" and arguments:
                return base.get(arguments[0], arguments[1] if len(arguments) > 1 else None)
        function = self._value(node.func, names)
        name = function.text if isinstance(function, OutsideName) else ast.unparse(node.func)
        if name.rpartition(".")[2] in _WRAPPERS and arguments:
            name = arguments[0].text if isinstance(arguments[0], OutsideName | Unsaid) else name
            arguments = arguments[1:]
        call = CallValue(name, arguments, {key: _passed(value, key) for key, value in values.items()})
        self.calls.append(call)
        return call

    def _run(self, function: ast.FunctionDef, arguments: list[Any], values: dict[str, Any]) -> Any:
        """Return what a function of the file returns for its arguments. Too deep or too often, it is `Unsaid`."""
        if self._depth >= _MOST_DEEP or len(self.calls) > _MOST_CALLS:
            return Unsaid(f"{function.name}(...)")
        names = self._bound(function, arguments, values)
        self._depth += 1
        try:
            returned = self.follow(function.body, names)
            return None if returned is _StatementEnd.GOES_ON else returned
        finally:
            self._depth -= 1

    def _bound(self, function: ast.FunctionDef, arguments: list[Any], values: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters of a function by name: defaults, then arguments by position and by name."""
        parameters = function.args
        positional = [*parameters.posonlyargs, *parameters.args]
        names = dict[str, Any]()
        if parameters.defaults:
            for parameter, default in zip(positional[-len(parameters.defaults) :], parameters.defaults, strict=True):
                names[parameter.arg] = self._value(default, {})
        for parameter, inner in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True):
            if inner is not None:
                names[parameter.arg] = self._value(inner, {})
        for parameter, value in zip(positional, arguments, strict=False):
            names[parameter.arg] = value
        declared = {parameter.arg for parameter in (*positional, *parameters.kwonlyargs)}
        names |= {name: value for name, value in values.items() if name in declared}
        if parameters.kwarg is not None:
            names[parameters.kwarg.arg] = {name: value for name, value in values.items() if name not in declared}
        return names


def read_python(text: str, path: Path) -> PythonFile:
    """Return the calls and functions of a file. Raises `InputError` with the line where it is no Python."""
    try:
        tree = ast.parse(text)
        file = PythonFile()
        file._names["__name__"] = "__main__"
        for statement in ast.walk(tree):
            if isinstance(statement, ast.FunctionDef):
                file.functions.setdefault(statement.name, statement)
        file.follow(tree.body, file._names)
    except SyntaxError as error:
        raise InputError(f"line {error.lineno}: is no Python: {error.msg}", file=path) from None
    except (RecursionError, ValueError, MemoryError):
        raise InputError("is nested too deeply", file=path) from None
    return file


def _import(statement: ast.Import | ast.ImportFrom, names: dict[str, Any]) -> None:
    """Enter the names of an import, each as its module calls it."""
    module = f"{statement.module}." if isinstance(statement, ast.ImportFrom) and statement.module else ""
    for alias in statement.names:
        name = alias.asname or alias.name
        if isinstance(statement, ast.Import) and alias.asname is None:
            name = alias.name.partition(".")[0]
            names[name] = OutsideName(name)
        else:
            names[name] = OutsideName(f"{module}{alias.name}")


def _attribute(base: Any, name: str, node: ast.expr) -> Any:
    if isinstance(base, CallValue):
        return base.enter(name)
    return OutsideName(f"{base.text}.{name}") if isinstance(base, OutsideName) else Unsaid(ast.unparse(node))


def _is_open(value: object) -> bool:
    """Return whether a value comes from outside the file, so that no condition on it can be followed."""
    return isinstance(value, Unsaid | OutsideName | CallValue)


def _passed(value: Any, text: str) -> Any:
    """Return a value that a call or an attribute is given; `Unsaid` for an attribute that nothing has said."""
    return Unsaid(text) if isinstance(value, CallValue) and value.is_empty else value


def _unary(sign: ast.unaryop, value: Any, node: ast.expr) -> Any:
    if isinstance(sign, ast.Not) and not _is_open(value):
        return not value
    if isinstance(sign, ast.USub) and isinstance(value, int | float):
        return -value
    return Unsaid(ast.unparse(node))


def _computed(compute: Callable[[Any, Any], Any], left: Any, right: Any, node: ast.AST) -> Any:
    """Return the result of two plain values; `Unsaid` where one is none, or they do not go together."""
    numbers = isinstance(left, int | float) and isinstance(right, int | float)
    plain = isinstance(left, int | float | str | None) and isinstance(right, int | float | str | None)
    if not (numbers or (plain and compute in (*_COMPARISONS.values(), operator.add))):
        return Unsaid(ast.unparse(node))
    if max(len(str(left)), len(str(right))) > _MOST_SIGNS:
        return Unsaid(ast.unparse(node))
    try:
        return compute(left, right)
    except (TypeError, ZeroDivisionError, OverflowError):
        return Unsaid(ast.unparse(node))

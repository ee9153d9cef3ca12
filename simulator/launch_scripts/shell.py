"""The command that a shell script launches, with its variables expanded. Nothing of the script is run.

Read are assignments, arrays, ``+=``, defaults such as ``${A:-8}``, arithmetic, and conditions on variables. Loops,
functions and what other commands print are not; a variable that gets its value from them has none here.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from simulator.bounds import is_digits
from simulator.errors import InputError
from simulator.launch_scripts.script import Unsaid

#: Stands in texts that are read for what the file does not say, around its number in a list. No shell has it in a text.
_MARK = "\0"
#: Longest script that is read; a quote that is never closed is looked for line by line.
MOST_CHARACTERS = 200_000
_MARKED = re.compile(rf"{_MARK}(\d+){_MARK}")
_NAME = r"[A-Za-z_]\w*"
_ASSIGNMENT = re.compile(rf"(?:export\s+|local\s+|declare\s+(?:-\w+\s+)*|readonly\s+)?({_NAME})(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(
    rf"\$\(\((?P<sum>[^\n]{{0,200}}?)\)\)|\$\{{(?P<name>{_NAME}|\d+)(?:\[[@*]\])?(?P<alt>:?[-=+?][^{{}}]{{0,500}})?\}}"
    rf"|\$(?P<plain>{_NAME}|\d)"
    r"|\$\((?P<command>[^()]{0,500})\)|`(?P<ticks>[^`]{0,500})`"
)
_SUBSTITUTION = re.compile(r"\$\(\([^\n]{0,200}?\)\)|\$\([^()]{0,500}\)")
_LAUNCHERS = (
    "torchrun",
    "deepspeed",
    "accelerate",
    "python",
    "python3",
    "srun",
    "mpirun",
    "bash",
    "sh",
    "eval",
    "exec",
)
#: Beginnings of the names of launchers whose ``-m`` is a module to run; srun's is not.
_RUN_PYTHON = ("torchrun", "deepspeed", "accelerate", "python")
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class Word(NamedTuple):
    """A word of a command. ``complete``: the file says all of it; if not, ``text`` has variables as the script does."""

    text: str
    complete: bool = True


@dataclass
class LaunchCommand:
    """The words of the command that starts training, and what was not followed on the way to it."""

    words: list[Word]
    skipped: list[str] = field(default_factory=list)


def launch_command(text: str, path: Path) -> LaunchCommand:
    """Return the last command of a script that starts a Python program.

    Raises `InputError` where there is none, or where the script is too long to be one.
    """
    if len(text) > MOST_CHARACTERS:
        message = "is too long for a launch script"
        raise InputError(message, file=path, found=len(text), allowed=f"at most {MOST_CHARACTERS:,} characters")
    reader = _ShellReader()
    commands: list[list[Word]] = []
    for statement in _statements(text.replace(_MARK, "")):
        if reader.follows(statement) and not reader.assigns(statement):
            command = [reader.word(part) for part in reader.words(statement)]
            if _starts_training(command):
                commands.append(command)
    if not commands and reader.skipped:
        raise InputError(
            "starts no training in what is followed, which loops, functions and other conditions are not",
            file=path,
            found=textwrap.shorten(reader.skipped[0], 80),
            fix="a script in which the command stands by itself, written out",
        )
    if not commands:
        raise InputError(
            "starts no training: no command runs a Python program",
            file=path,
            allowed="torchrun, deepspeed, accelerate launch, python or srun, with a .py file or -m",
        )
    *earlier, words = commands
    passed_over = [
        f"{textwrap.shorten(' '.join(word.text for word in each), 80)}, as a later command counts" for each in earlier
    ]
    return LaunchCommand(words, [*reader.skipped, *passed_over])


def _starts_training(words: list[Word]) -> bool:
    if not words or Path(words[0].text).name not in _LAUNCHERS:
        return False
    return len(words) > 3 and any(text.endswith(".py") or text in ("-m", "--module") for text, _ in words[1:])


def program_at(words: list[Word]) -> int:
    """Return where the options of the program begin, behind those of what launches it: the first file or module.

    >>> program_at([Word(text) for text in ("torchrun", "--nnodes", "2", "train.py", "--lr", "1")])
    4
    """
    begin, by_python = 1, False
    for number, word in enumerate(words):
        if number and word.text.endswith(".py"):
            return number + 1
        by_python = by_python or Path(word.text).name.startswith(_RUN_PYTHON)
        if by_python and word.text in ("-m", "--module"):
            begin = number + 2
            if not any(one.text.startswith("torch.distributed.") for one in words[number + 1 : begin]):
                break
    return begin


def options_of(words: Iterable[Word]) -> dict[str, str | bool | Unsaid]:
    """Return the options among words: name with underscores -> value. A switch has True.

    >>> options_of([Word("x.py"), Word("--num-layers"), Word("4"), Word("--bf16"), Word("--lr=1e-4")])
    {'num_layers': '4', 'bf16': True, 'lr': '1e-4'}
    >>> options_of([Word("--save"), Word("$1/last", complete=False)])
    {'save': Unsaid(text='$1/last')}
    """
    values: dict[str, list[Word]] = {}
    name = ""
    for word in words:
        if match := re.fullmatch(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", word.text, re.DOTALL):
            name = match[1].replace("-", "_")
            values[name] = [] if match[2] is None else [Word(match[2], word.complete)]
        elif name and not word.text.endswith(".py"):
            values[name].append(word)
        else:
            name = ""
    return {name: _value_of(value) for name, value in values.items()}


def repeated_options(words: Iterable[Word]) -> list[str]:
    """Return what options say that stand among words before, with other values; the last of each counts.

    >>> repeated_options([Word("--num-layers"), Word("4"), Word("--bf16"), Word("--num-layers=8"), Word("--bf16")])
    ['num_layers 4']
    """
    options: list[list[Word]] = []
    for word in words:
        if word.text.startswith("-") and options_of([word]):
            options.append([])
        if options:
            options[-1].append(word)
    last: dict[str, str | bool | Unsaid] = {}
    earlier: list[str] = []
    for option in options:
        for name, value in options_of(option).items():
            if last.get(name, value) != value:
                before = last[name]
                text = "" if before is True else f" {before.text if isinstance(before, Unsaid) else before}"
                earlier.append(f"{name}{text}")
            last[name] = value
    return earlier


def _value_of(words: list[Word]) -> str | bool | Unsaid:
    text = " ".join(word.text for word in words)
    if not all(word.complete for word in words):
        return Unsaid(text)
    return text if words else True


class _ShellReader:
    """Variables, and whether the branch of a condition is the one that is taken."""

    def __init__(self) -> None:
        self.variables: dict[str, str] = {}
        self.skipped: list[str] = []
        self._unsaid: list[str] = []  # as the script writes them
        self._branches: list[tuple[bool, bool]] = []  # this branch holds; one of this condition did
        self._loops = 0

    def follows(self, statement: str) -> bool:
        """Return whether a statement is reached; conditions and ends of them are not statements themselves."""
        first = statement.split(maxsplit=1)[0] if statement.split() else ""
        rest = statement[len(first) :].strip()
        end = {"for": "done", "while": "done", "until": "done", "select": "done", "case": "esac"}.get(first)
        if end is None and re.match(r"function\s+[\w-]+|[\w-]+\s*\(\)", statement):
            end = "}"
        if end is not None:
            self._loops += not re.search(rf"(^|[\s;]){end}$", statement)
            self.skipped.append(statement.splitlines()[0])
            return False
        if self._loops:
            self._loops -= first in ("done", "esac", "}")
            return False
        if first in ("if", "elif"):
            begins = first == "if" or not self._branches  # an elif without its if is one
            reached = all(holds for holds, _ in self._branches[: None if begins else -1])
            before = False if begins else self._branches.pop()[1]
            holds = reached and not before and self._holds(rest)
            self._branches.append((holds, holds or before))
        elif first == "else" and self._branches:
            self._branches[-1] = (not self._branches[-1][1], True)
        elif first == "fi" and self._branches:
            self._branches.pop()
        elif first not in ("then", "do", "done", "esac", "}", "{", ""):
            return all(holds for holds, _ in self._branches)
        return False

    def assigns(self, statement: str) -> bool:
        """Take an assignment, or several on a line; return whether the statement is nothing else."""
        match = _ASSIGNMENT.fullmatch(statement.strip())
        if match is None:
            return False
        name, add, value = match[1], match[2], match[3].strip()
        if value.startswith("("):
            value = " ".join(self.words(value[1:].rsplit(")", 1)[0]))
        else:
            parts = split_words(self._substituted(value))
            if len(parts) > 1 and not all(_ASSIGNMENT.fullmatch(part) for part in parts[1:]):
                return False  # A=1 command
            for part in parts[1:]:
                self.assigns(part)
            value = self.expand(parts[0] if parts else "")
        self.variables[name] = f"{self.variables.get(name, '')} {value}".strip() if add else value
        return True

    def words(self, statement: str) -> list[str]:
        """Return the words of a statement with variables expanded and split, without quotes and redirections."""
        statement = self._substituted(statement)
        statement = re.split(r"\s(?:2?>{1,2}|\||&&?|\|\|)\s?", re.sub(r"2>&1", "", statement))[0]
        words = [word for part in split_words(statement) for word in split_words(self.expand(part))]
        while words and (_ASSIGNMENT.fullmatch(words[0]) or words[0] in ("eval", "exec", "time", "nohup", "sudo")):
            words = words[1:]
        return words

    def word(self, text: str) -> Word:
        """Return a word of an expanded text, with what the file does not say as the script writes it."""
        written = _MARKED.sub(lambda match: self._unsaid[int(match[1])], text)
        return Word(written, complete=written == text)

    def expand(self, text: str) -> str:
        """Return a text with its variables expanded, and those without a value marked."""
        for _ in range(20):  # a variable may hold another's name
            expanded = _VARIABLE.sub(self._value, text)
            if expanded == text:
                break
            text = expanded
        return text

    def _value(self, match: re.Match[str]) -> str:
        if match["sum"] is not None:
            return self._sum(match["sum"])
        if match["command"] is not None or match["ticks"] is not None:
            return self._marked(match[0])
        name, alternative = match["name"] or match["plain"], match["alt"] or ""
        value = self.variables.get(name)
        default = re.sub(r"^:?[-=+?]", "", alternative).strip("\"'")
        if "+" in alternative[:2]:
            return default if value else ""
        if value is None or (value == "" and alternative.startswith(":")):
            return default if alternative and "?" not in alternative[:2] else self._marked(match[0])
        return value

    def _substituted(self, text: str) -> str:
        """Return a text with sums and outputs of commands put in, which may hold blanks and are one word."""
        return _SUBSTITUTION.sub(lambda part: self.expand(part[0]), text)

    def _marked(self, written: str) -> str:
        if written not in self._unsaid:
            self._unsaid.append(written)
        return f"{_MARK}{self._unsaid.index(written)}{_MARK}"

    def _sum(self, text: str) -> str:
        bare = re.sub(rf"\$?\b({_NAME})\b", lambda match: self.variables.get(match[1], match[1]), text)
        try:
            return str(_calculated(ast.parse(self.expand(bare).strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return self._marked(f"$(({text}))")

    def _holds(self, condition: str) -> bool:
        text = re.sub(r";?\s*then$", "", condition).strip()
        for split, combine in ((r"\]\]?\s*\|\|\s*\[\[?", any), (r"\]\]?\s*&&\s*\[\[?", all)):
            parts = re.split(split, text)
            if len(parts) > 1:
                return combine(self._holds(f"[ {part.strip().strip('[]').strip()} ]") for part in parts)
        words = [self.expand(word) for word in split_words(text.strip().strip("[]").strip())]
        words = ["" if word.startswith(_MARK) else word for word in words]
        negated = bool(words) and words[0] == "!"
        match words[1:] if negated else words:
            case ["-n", value]:
                result = value != ""
            case ["-z", value]:
                result = value == ""
            case [a, ("==" | "=" | "-eq"), b]:
                result = a == b
            case [a, ("!=" | "-ne"), b]:
                result = a != b
            case [a, ("-gt" | "-lt" | "-ge" | "-le" | ">" | "<") as sign, b] if is_digits(a) and is_digits(b):
                result = {"-gt": int(a) > int(b), ">": int(a) > int(b), "-lt": int(a) < int(b)}.get(sign) or (
                    int(a) >= int(b) if sign == "-ge" else sign in ("-le", "<") and int(a) <= int(b) - (sign == "<")
                )
            case _:
                self.skipped.append(f"if {text}")
                return False
        return result != negated


def _calculated(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_calculated(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_calculated(left), _calculated(right))
    raise ValueError("no arithmetic")


def split_words(text: str) -> list[str]:
    """Return the words of a text without quotes, comments left out; a text with an odd quote split at blanks."""
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.split()


def _statements(text: str) -> Iterator[str]:
    """Yield statements: lines, with those that a backslash, an open bracket or an open quote continues.

    Comments are left out."""
    lines: list[str] = []
    state = _OpenText()
    for line in re.sub(r"\\\n", " ", text.replace("\r\n", "\n")).splitlines():
        lines.append(state.read(line))
        if not state.is_open:
            yield from _parts("\n".join(lines))
            lines = []
    yield from _parts("\n".join(lines))


def _parts(statement: str) -> Iterator[str]:
    """Yield the statements of a line, whose keywords may stand behind a semicolon."""
    for part in re.split(r";\s*(?=then\b|do\b|fi\b|done\b|else\b)|;;", statement.strip()):
        if part.strip():
            yield part.strip().rstrip(";")


class _OpenText:
    """Quote and bracket that are open at the end of a line."""

    def __init__(self) -> None:
        self._quote = ""
        self._depth = 0

    @property
    def is_open(self) -> bool:
        return bool(self._quote) or self._depth > 0

    def read(self, line: str) -> str:
        """Take the next line, and return it without its comment."""
        array = not self.is_open and re.match(rf"\s*(?:export\s+)?{_NAME}\+?=\(", line) is not None
        before = " "
        for at, char in enumerate(line):
            if before == "\\":
                char = " "
            elif self._quote:
                self._quote = "" if char == self._quote else self._quote
            elif char in "\"'":
                self._quote = char
            elif char == "#" and before.isspace():
                return line[:at].rstrip()
            elif array or self._depth:
                self._depth = max(self._depth + (char == "(") - (char == ")"), 0)
            before = char
        return line

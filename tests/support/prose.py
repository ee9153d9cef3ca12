"""Offences against plain words in docstrings, comments and names: the rules of `tests/project/test_words.py`.

Run ``python -m tests.support.prose [FOLDER ...]`` to list the offenders of some folders.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

#: Words of the longest sentence.
LONGEST = 28
#: A docstring that begins with one of these lacks its subject.
_WITHOUT_SUBJECT = re.compile(
    r"(That|Those|These|Of|What|Who|Whom|Whose|Where|As|So|Than|From|By|In|On|With|Which|Such|It|They|Whether)\b"
)
_PRONOUN_CHAIN = re.compile(
    r"\b(what|who|those|that) (it|they|he|one|none|all|each) (takes?|has|have|had|does|do|is|are|holds?|gets?)\b"
)
#: Names that say nothing of what they hold: pronouns, adjectives and participles on their own.
EMPTY_NAMES = {"found", "own", "known", "given", "made", "held", "of", "gone", "said", "taken", "others"}


class Offence(NamedTuple):
    """A place that a reader has to read twice, and why."""

    path: Path
    line: int
    reason: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}: {self.text[:120]}"


def offences(path: Path) -> list[Offence]:
    """Return the offences of the Python file ``path``, in order of lines."""
    source = path.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(source)))
    in_texts = [
        Offence(path, line, *offence)
        for line, text, first in _texts(nodes, source)
        for offence in _of_text(text, first)
    ]
    in_names = [Offence(path, line, "empty name", name) for line, name in _names(nodes) if _is_empty(name)]
    return sorted([*in_texts, *in_names])


def _of_text(text: str, is_docstring: bool) -> Iterator[tuple[str, str]]:
    prose = re.split(r"\n\s*>>>|\x08|\n\n    ", text)[
        0
    ]  # doctests, examples of commands and indented blocks are no prose
    sentences = re.split(r"(?<=[.!?;:])\s+(?=[-A-Z0-9`\"'(])", " ".join(prose.split()))
    for number, sentence in enumerate(sentences):
        if is_docstring and number == 0 and _WITHOUT_SUBJECT.match(sentence):
            yield "no subject", sentence
        elif len(sentence.split()) > LONGEST:
            yield f"{len(sentence.split())} words", sentence
        elif _PRONOUN_CHAIN.search(sentence):
            yield "pronoun chain", sentence


def _texts(nodes: Iterable[ast.AST], source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, text, True for a docstring) of every docstring and block of comments."""
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text, True
    block: list[str] = []
    begin = end = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if block and token.start[0] != end + 1:
            yield begin, " ".join(block), False
            block = []
        begin = begin if block else token.start[0]
        end = token.start[0]
        block.append(token.string.lstrip("#: ").strip())
    if block:
        yield begin, " ".join(block), False


def _names(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every variable, argument, function and class that the file defines."""
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name


def _is_empty(name: str) -> bool:
    bare = name.strip("_")
    return bare in EMPTY_NAMES or bare.startswith("of_")


def main(folders: list[str]) -> None:
    """Print the offences of ``folders``, and their number."""
    files = [path for folder in folders or ["simulator", "calibration"] for path in sorted(Path(folder).rglob("*.py"))]
    listed = [offence for path in files for offence in offences(path)]
    print(*listed, f"{len(listed)} in {len(files)} files", sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Events of a profiler's JSON file one by one, so that a file of any size takes little memory.

Format: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from simulator.config.misplaced_file import GRAPH, TRACE, use_of
from simulator.config.packed import unpacked
from simulator.encodings import encoding_of
from simulator.errors import InputError
from simulator.input_files import brief, files_read

#: Characters that are read at once; the largest event, or value of the header, has at most `_LONGEST`.
_CHUNK, _LONGEST = 1 << 20, 1 << 26
_BLANK = re.compile(r"[\s,]*")
#: Endings of files in Perfetto's own format, a protocol buffer.
PERFETTO = (".pftrace", ".perfetto-trace", ".pftrace.gz", ".perfetto-trace.gz")
Event = dict[str, Any]


class EventFile:
    """A file of trace events: ``events`` yields them in order, and fills ``header`` with all keys beside them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self._decoder = json.JSONDecoder(strict=False)
        self._text = ""
        self._at = 0
        self._ended = False

    def events(self) -> Iterator[Event]:
        """Yield every event. Raises `InputError` where the file is missing, cut off or no trace."""
        if self.path.is_file() and self.path.name.lower().endswith(PERFETTO):
            raise InputError(
                "is in Perfetto's own format, which `trace` does not read",
                file=self.path,
                allowed="JSON with traceEvents, gzipped or not",
                fix="of a simulated step: run with --trace-dir DIR",
            )
        with unpacked(self.path) as stream:
            files_read.add(self.path.resolve())
            yield from self._events(stream)

    def _events(self, stream: BufferedIOBase) -> Iterator[Event]:
        beginning = stream.read(_CHUNK)
        decode = codecs.getincrementaldecoder(encoding_of(beginning))(errors="replace")
        self._stream, self._decode, self._text = stream, decode, decode.decode(beginning)
        first = self._next()
        if not first:
            raise InputError("is empty", file=self.path)
        if first == "[":
            yield from self._elements()
        elif first == "{":
            yield from self._members()
        else:
            raise self._other_kind()

    def _members(self) -> Iterator[Event]:
        """Yield the events of an object with the key ``traceEvents``; other keys go into the header."""
        self._at += 1
        seen = False
        while (sign := self._next()) != "}":
            if sign != '"':
                raise self._cut_off() if not sign else self._no_trace(f"has {brief(sign)} where a key should be")
            key = str(self._value())
            if self._next() != ":":
                raise self._cut_off()
            self._at += 1
            if key == "nodes" and "schema" in self.header:
                raise self._execution_trace("PyTorch")
            sign = self._next()
            if key == "traceEvents" and sign == "[":
                seen = True
                yield from self._elements()
            else:
                self.header[key] = self._value()
        if not seen:
            if "workload_graph" in self.header:
                raise self._execution_trace("Chakra")
            raise self._no_trace("has no list traceEvents")

    def _elements(self) -> Iterator[Event]:
        """Yield the events of the list that stands here."""
        self._at += 1
        while (sign := self._next()) != "]":
            if not sign:
                raise self._cut_off()
            event = self._value()
            if isinstance(event, dict):
                yield event
        self._at += 1

    def _next(self) -> str:
        """Return the next character that is neither blank nor a comma; empty at the end."""
        while True:
            match = _BLANK.match(self._text, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _value(self) -> Any:
        """Return the JSON value that stands here, and go behind it."""
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except RecursionError:
                raise InputError("is nested too deeply", file=self.path) from None
            except ValueError as error:
                rest = len(self._text) - self._at
                if rest > _LONGEST or not self._more():
                    raise (
                        self._cut_off()
                        if rest <= _LONGEST and _unfinished(error, self._text)
                        else self._no_trace(f"cannot be read from {brief(self._text[self._at : self._at + 40])} on")
                    ) from None
                continue
            if end == len(self._text) and self._more():  # a number may go on in the next piece
                continue
            self._at = end
            return value

    def _more(self) -> bool:
        """Read a further piece behind what is not used yet; return False at the file's end."""
        if self._ended:
            return False
        # Pieces grow with what they must hold, so that a long value is not tried too often.
        raw = self._stream.read(max(_CHUNK, len(self._text) - self._at))
        self._ended = not raw
        self._text = self._text[self._at :] + self._decode.decode(raw, final=self._ended)
        self._at = 0
        return not self._ended

    def _other_kind(self) -> InputError:
        """Return the error of a file that is no JSON, which its name or its first bytes tell."""
        if ".et" in self.path.suffixes:
            return self._execution_trace("Chakra")
        return self._no_trace(f"begins with {brief(self._text[self._at : self._at + 20])}")

    def _execution_trace(self, origin: str) -> InputError:
        return InputError(
            f"is an execution trace of {origin}, which has no times at which kernels ran",
            file=self.path,
            fix="the trace of torch.profiler of the same run",
        )

    def _cut_off(self) -> InputError:
        return InputError("is cut off: its JSON does not end", file=self.path)

    def _no_trace(self, why: str) -> InputError:
        if (use := use_of(self.path)) is not None and use not in (TRACE, GRAPH):
            return use.error(self.path, "a trace")
        return InputError(
            f"is no trace of a profiler: it {why}", file=self.path, allowed="JSON with traceEvents, gzipped or not"
        )


def _unfinished(error: ValueError, text: str) -> bool:
    """Tell whether JSON ended too early, rather than being wrong somewhere."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.pos >= len(text) - 1 or error.msg.startswith("Unterminated string")

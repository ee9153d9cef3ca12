"""Bytes of files as text: UTF-8, or UTF-16 where a mark says so, as behind ``>`` in PowerShell."""

from __future__ import annotations

import codecs

from simulator.errors import InputError


def encoding_of(beginning: bytes) -> str:
    """Return Python's name of the encoding of a text that begins so; a mark in front is no part of the text.

    >>> encoding_of("name".encode("utf-16")), encoding_of(b"name")
    ('utf-16', 'utf-8-sig')
    """
    return "utf-16" if beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"


def as_utf8(content: bytes) -> bytes:
    """Return a text in UTF-16 in UTF-8, be its end cut off; other bytes as they are."""
    if encoding_of(content) != "utf-16":
        return content
    return content.decode("utf-16", "ignore").encode("utf-8", "ignore")


def decoded(content: bytes, path: object) -> str:
    """Return the text of a file's bytes. Raises `InputError`, naming ``path``, where they are none."""
    try:
        text = content.decode(encoding_of(content))
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise InputError("is not text (UTF-8)", file=path)
    return text

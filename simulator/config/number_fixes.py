"""Fixes of texts that are no numbers: a usual spelling, or a sweep over several numbers."""

from __future__ import annotations

import re

from simulator.quantities import decimal_point, usual_spelling


def number_fix(key: str, name: str, text: str, whole: bool = True) -> str | None:
    """Return what to write for a number in quotes, or as other habits write it, or for several numbers.

    >>> number_fix("parallelism.tp", "tp", "4"), number_fix("training.total_tokens", "total_tokens", "e12")
    ('tp: 4, without quotes', 'total_tokens: 1e12')
    >>> number_fix("training.seq", "seq", "8,192")
    'seq: 8192, or llmsim sweep WORKLOAD --grid training.seq=8,192, which tries each of them'
    >>> number_fix("model.dropout", "dropout", "0,1", whole=False)
    'dropout: 0.1, or llmsim sweep WORKLOAD --grid model.dropout=0,1, which tries each of them'
    """
    if re.fullmatch(r"[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?", text.strip()):
        return f"{name}: {text.strip()}, without quotes"
    usual = usual_spelling(text) or (None if whole else decimal_point(text))
    tried = swept(key, text, r"[-+]?[\d.]+(?:[eE][-+]?\d+)?")
    return ", or ".join(filter(None, [usual and f"{name}: {usual}", tried])) or None


def swept(key: str, value: object, one: str) -> str | None:
    """Return how to try all values of a list joined by commas, each of the form ``one``; None where it is no such list.

    >>> swept("parallelism.tp", "1, 2,4", "[0-9]+")
    'llmsim sweep WORKLOAD --grid parallelism.tp=1,2,4, which tries each of them'
    """
    if not isinstance(value, str) or not re.fullmatch(rf"\s*(?:{one})(?:\s*,\s*(?:{one}))+\s*", value):
        return None
    return f"llmsim sweep WORKLOAD --grid {key}={''.join(value.split())}, which tries each of them"

"""Fixes of errors, each tried on the workload before it is told."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from simulator.config.section import paths
from simulator.config.workload import Workload
from simulator.errors import InputError, each
from simulator.input_files import parse_value

#: Part of a fix that a workload file can say as it stands: a key, and one value or several joined by ``or``. A key of
#: another section stands in its section: ``offload: {optimizer: cpu}``.
_SETTING = re.compile(r"([A-Za-z_]\w*): (\[[^\]]*\]|\{[^}]*\}|[\w.+-]+(?: or [\w.+-]+)*)")

#: What checks a workload with some dotted keys changed. It raises `InputError`.
Trial = Callable[[Mapping[str, Any]], object]


def keep_what_works(error: InputError, trial: Trial) -> None:
    """Take those settings out of the fix of ``error`` that ``trial`` refuses.

    A setting is refused where an error is then told of its own key, or another one of the key of ``error``. Advice in
    words, and settings of files other than the workload, stay.
    """
    if error.fix is not None:
        error.fix = ", or ".join(_working(error, trial)) or None


def _working(error: InputError, trial: Trial) -> Iterator[str]:
    """Yield the parts of a fix that are no settings, or that work."""
    for part in (error.fix or "").split(", or "):
        setting = _SETTING.fullmatch(part)
        key = _whole_key(setting[1], error.key or "") if setting else None
        if setting is None or key is None:
            yield part
            continue
        texts = [setting[2]] if setting[2].startswith(("[", "{")) else setting[2].split(" or ")
        values = [text for text in texts if not _is_refused(key, text, error, trial)]
        if values:
            yield f"{setting[1]}: {' or '.join(values)}"


def _whole_key(name: str, beside: str) -> str | None:
    """Return the dotted key that a fix means.

    It is that as it stands, or in the section of the key ``beside``, or the only one of this name.

    >>> _whole_key("micro_batch", "training.global_batch"), _whole_key("granularity", "training.recompute.granularity")
    ('training.micro_batch', 'training.recompute.granularity')
    """
    keys = [key for key in paths(Workload) if not key.startswith("cluster.")]
    above = ".".join([*beside.split(".")[:-1], name])
    named = [key for key in keys if key.rpartition(".")[2] == name]
    candidates = [key for key in (name, above) if key in keys] or (named if len(named) == 1 else [])
    return candidates[0] if candidates and candidates[0] != "cluster" else None


def _is_refused(key: str, text: str, mended: InputError, trial: Trial) -> bool:
    """Tell whether errors are told of a key once it has a value, or another one of the key that was ``mended``."""
    value = parse_value(key, text, "fix")
    inside = value if isinstance(value, Mapping) else {}
    try:
        trial({f"{key}.{name}": one for name, one in inside.items()} or {key: value})
    except InputError as error:
        return any(
            f"{one.key}.".startswith(f"{key}.") or (one.key == mended.key and one.message != mended.message)
            for one in each(error)[0]
        )
    return False

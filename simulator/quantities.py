"""Numbers with the units that people write beside them: ``8k`` tokens, ``25MiB``, ``400Gbps``, ``3us``.

The key says which units a number may have. A number without one is in the unit of the key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from types import MappingProxyType
from typing import NamedTuple

from simulator.errors import InputError
from simulator.input_files import brief

_DECIMAL = {"": 0, "k": 3, "K": 3, "M": 6, "G": 9, "T": 12, "P": 15}
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5}
_BYTES = {
    **{f"{prefix}B": Decimal(10) ** power for prefix, power in _DECIMAL.items()},
    **{f"{prefix}B": Decimal(1024) ** power for prefix, power in _BINARY.items()},
}
_BITS_PER_S = {
    f"{prefix}{unit}": Decimal(10) ** power for prefix, power in _DECIMAL.items() for unit in ("bps", "b/s", "bit/s")
} | {f"{unit}{per}": 8 * size for unit, size in _BYTES.items() for per in ("/s", "ps")}
#: Of a millionth the sign of Latin-1, and the Greek letter that keyboards write.
_SECONDS = {
    "ns": "1e-9",
    "us": "1e-6",
    "\u00b5s": "1e-6",
    "\u03bcs": "1e-6",
    "ms": "1e-3",
    "s": "1",
    "min": "60",
    "h": "3600",
}
_HERTZ = {"Hz": "1", "kHz": "1e3", "MHz": "1e6", "GHz": "1e9"}


class WrittenUnits(NamedTuple):
    """Units that a number may have.

    ``units``: each unit's size in that of the key. ``example``: a number with one. ``shown``: units of tables.
    """

    units: Mapping[str, Decimal]
    example: str
    shown: tuple[str, ...]


def _quantity(units: Mapping[str, Decimal | str], example: str, shown: str) -> WrittenUnits:
    sizes = {unit: Decimal(size) for unit, size in units.items()}
    return WrittenUnits(MappingProxyType(sizes), example, tuple(shown.split()))


#: Tokens that are handled together. Lengths are powers of two by habit: 8k of context is 8,192.
LENGTH = _quantity({"k": "1024", "K": "1024", "M": str(1024**2)}, "8k, which is 8192", "")
_TOKEN_POWERS = {"k": 3, "m": 6, "b": 9, "t": 12}
#: Tokens of a whole run.
TOKENS = _quantity(
    {unit: Decimal(10) ** power for letter, power in _TOKEN_POWERS.items() for unit in (letter, letter.upper())},
    "1T, or 300B",
    "T B M",
)
_BY_KEY = {
    "seq": LENGTH,
    "sliding_window": LENGTH,
    "attention_chunk": LENGTH,
    "total_tokens": TOKENS,
}
_BY_ENDING = {
    "_bytes": _quantity(_BYTES, "25MiB", "TiB GiB MiB KiB TB GB MB kB"),
    "_Bps": _quantity({unit: size / 8 for unit, size in _BITS_PER_S.items()}, "450GB/s", "TB/s GB/s MB/s"),
    "_bps": _quantity(_BITS_PER_S, "400Gbps", "Tbps Gbps Mbps"),
    "_hz": _quantity(_HERTZ, "1.98GHz", "GHz MHz"),
    "_s": _quantity(_SECONDS, "3us", "s ms us ns"),
    "_w": _quantity({"W": "1", "kW": "1000"}, "700W", "W"),
}
#: Characters of a number with its unit that are read at a glance.
_SHORT = 10
BYTES = _BY_ENDING["_bytes"]
_PREFIXES = "kKMGTPi"
#: Keys that count sequences, which many people count in tokens.
SEQUENCE_COUNTS = ("global_batch", "micro_batch")
_NUMBER = re.compile(
    r"\s*([-+]?(?:[0-9]+(?:_[0-9]+)*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?)\s*([^\W\d_]+(?:/s)?)\s*"
)
#: Numbers that other languages read, or that slipped: hexadecimal ones, other digits than 0 to 9, doubled underscores.
_ODD_NUMBER = re.compile(r"[-+]?(?:0[xX][0-9a-fA-F_]+|0[oO][0-7_]+|\d[\d_]*)")
UNUSUAL = "is a number in an unusual spelling"
#: Numbers with commas between thousands, and exponents alone.
_THOUSANDS = re.compile(r"\s*([-+]?[0-9]{1,3}(?:,[0-9]{3})+)((?:\.[0-9]+)?\s*[^\W\d_]*(?:/s)?)\s*")
#: A number with a comma before its decimals, as many countries write it.
_DECIMAL_COMMA = re.compile(r"\s*([-+]?[0-9]+),([0-9]+(?:[eE][-+]?[0-9]{1,3})?\s*[^\W\d_]*(?:/s)?)\s*")
_EXPONENT = re.compile(r"\s*[eE]([-+]?[0-9]{1,3})\s*")


def quantity_of(key: str) -> WrittenUnits | None:
    """Return what the number under the last part of a dotted ``key`` counts; None where it has no unit.

    >>> quantity_of("training.seq").example, quantity_of("parallelism.tp")
    ('8k, which is 8192', None)
    """
    name = key.rpartition(".")[2]
    if name in _BY_KEY or name.endswith("_per_s"):
        return _BY_KEY.get(name)
    return next((quantity for ending, quantity in _BY_ENDING.items() if name.endswith(ending)), None)


def number_of(text: str, quantity: WrittenUnits) -> float | int | None:
    """Return the number that a text with a unit means, in the unit of the key; None where it means none.

    >>> number_of("8k", LENGTH), number_of("1.5B", TOKENS), number_of("8 apples", LENGTH)
    (8192, 1500000000, None)
    """
    match = _NUMBER.fullmatch(text)
    if match is None or match[2] not in quantity.units:
        return None
    try:
        number = Decimal(match[1].replace("_", "")) * quantity.units[match[2]]
    except InvalidOperation:
        return None
    return int(number) if number == number.to_integral_value() and abs(number) < 10**18 else float(number)


def has_foreign_unit(text: str, quantity: WrittenUnits | None = None) -> bool:
    """Return whether a text is a number with some unit behind it, which is none of the ``quantity``.

    >>> has_foreign_unit("8k"), has_foreign_unit("8k", LENGTH), has_foreign_unit("8"), has_foreign_unit("fast")
    (True, False, False, False)
    """
    match = _NUMBER.fullmatch(text)
    return match is not None and (quantity is None or match[2] not in quantity.units)


def nearest_spellings(text: str, quantity: WrittenUnits) -> list[str]:
    """Return spellings that ``quantity`` has for a number in small letters, or without the end of its unit.

    A small b stays a bit where the quantity is counted in bits too. In a unit of capitals alone it may be either.

    >>> nearest_spellings("400gbps", quantity_of("bandwidth_bps")), nearest_spellings("400G", quantity_of("a_bps"))
    (['400Gbps'], ['400Gbps'])
    >>> nearest_spellings("400GBPS", quantity_of("bandwidth_bps")), nearest_spellings("25Mb", BYTES)
    (['400Gbps', '400GBps'], [])
    >>> nearest_spellings("25M", BYTES), nearest_spellings("8Ki", LENGTH), nearest_spellings("8 apples", LENGTH)
    (['25MB', '25MiB'], ['8K'], [])
    """
    match = _NUMBER.fullmatch(text)
    if match is None or match[2] in quantity.units:
        return []
    unit = match[2]
    near = [one for one in quantity.units if one.lower() == unit.lower()]
    if "b" in unit:
        in_bits = [one for one in near if "b" in one]
        near = in_bits if in_bits or not unit.islower() else near
    if not near and unit.strip(_PREFIXES.lower() + _PREFIXES) == "":
        example = re.sub(r"[^a-zA-Z/].*", "", quantity.example.lstrip("0123456789."))
        ending = example.lstrip(_PREFIXES)
        prefixes = [
            prefix for prefix in (unit[0], unit[0].upper(), unit[0].lower()) if prefix + ending in quantity.units
        ]
        near = [prefix + infix + ending for prefix in prefixes[:1] for infix in ("", "i")]
    return [match[1] + one for one in near if one in quantity.units]


def usual_spelling(text: str) -> str | None:
    """Return a number with commas between thousands, or an exponent alone, as files write it; None of any other text.

    >>> usual_spelling("1,024"), usual_spelling("450,000MB/s"), usual_spelling("e12"), usual_spelling("1,2")
    ('1024', '450000MB/s', '1e12', None)
    """
    if exponent := _EXPONENT.fullmatch(text):
        return f"1e{exponent[1]}"
    thousands = _THOUSANDS.fullmatch(text)
    return thousands[1].replace(",", "") + thousands[2].strip() if thousands else None


def decimal_point(text: str) -> str | None:
    """Return a number that may have a decimal comma with a point; None where it is none, or has commas for thousands.

    >>> decimal_point("0,5"), decimal_point("1,5T"), decimal_point("1,024"), decimal_point("1,2,4")
    ('0.5', '1.5T', None, None)
    """
    match = _DECIMAL_COMMA.fullmatch(text)
    return f"{match[1]}.{match[2].strip()}" if match and usual_spelling(text) is None else None


def plain_spellings(text: str) -> list[str]:
    """Return the whole numbers, in digits, that a text in another spelling may mean.

    >>> plain_spellings("8k"), plain_spellings("0x20"), plain_spellings("8__000"), plain_spellings("\u0668")
    (['8000', '8192'], ['32'], ['8000'], ['8'])
    >>> plain_spellings("8.0"), plain_spellings("many"), plain_spellings("8GB")
    (['8'], [], [])
    >>> plain_spellings("1,024"), plain_spellings("e3")
    (['1024'], ['1000'])
    """
    text = usual_spelling(text) or text
    if is_unusual(text):
        digits = text.strip().replace("_", "")
        try:
            return [str(int(digits, 0 if digits.lstrip("+-")[1:2].isalpha() else 10))]
        except ValueError:
            return []
    counted = [number_of(text, quantity) for quantity in (TOKENS, LENGTH)]
    numbers = counted if None not in counted else [_decimal(text)]
    return list(dict.fromkeys(str(number) for number in numbers if isinstance(number, int)))


def _decimal(text: str) -> int | None:
    """Return the whole number that a text such as 8.0 or 1e3 is; None of any other."""
    number = float(text) if re.fullmatch(r"[0-9]{1,15}(\.0*)?([eE]\+?[0-9])?", text.strip()) else math.nan
    return int(number) if number.is_integer() else None


def is_unusual(text: str) -> bool:
    """Return whether a text is a number that files spell otherwise.

    >>> is_unusual("0x20"), is_unusual("8__000"), is_unusual("8_"), is_unusual("\u0668"), is_unusual("8_000")
    (True, True, True, True, False)
    """
    usual = re.fullmatch(r"[-+]?[0-9]+(?:_[0-9]+)*", text.strip())
    return usual is None and _ODD_NUMBER.fullmatch(text.strip()) is not None


def in_sequences(text: str, seq: object) -> str:
    """Return how many sequences of ``seq`` tokens a number of tokens is, as text for a key that counts sequences.

    >>> in_sequences("4M", 8192), in_sequences("4M", "8k"), in_sequences("1k", 1000), in_sequences("4M", None)
    ('512, as 4M tokens are at seq 8192', '512, as 4M tokens are at seq 8192', '1k tokens / seq', '4M tokens / seq')
    """
    length, tokens = as_written("seq", seq), number_of(text, LENGTH)
    if not isinstance(length, int) or isinstance(length, bool) or length < 1 or not tokens or tokens % length:
        return f"{text} tokens / seq"
    return f"{tokens // length:.0f}, as {text} tokens are at seq {length}"


def read_length(text: str, option: str, most: int = 10**9) -> int:
    """Return a number of tokens of an answer or option, of which 8k are 8,192. Raises `InputError`.

    >>> read_length("8k", "--seq"), read_length("4096", "--seq")
    (8192, 4096)
    """
    number = read_number(text, LENGTH, option)
    if not isinstance(number, int) or not 1 <= number <= most:
        allowed = f">= 1, <= {most:,}; or such as {LENGTH.example}"
        raise InputError("must be a whole number of tokens", file=option, found=brief(text), allowed=allowed)
    return number


def as_written(key: str, value: object) -> object:
    """Return the number that a text under ``key`` means; any other value as it is.

    >>> as_written("nics.bandwidth_bps", "400Gbps"), as_written("latency_s", "3us"), as_written("bandwidth_Bps", 5e9)
    (400000000000, 3e-06, 5000000000.0)
    """
    if not isinstance(value, str) or (quantity := quantity_of(key)) is None:
        return value
    number = number_of(value, quantity)
    return value if number is None else number


def as_text(key: str, value: object) -> str | None:
    """Return the shortest text with a unit that means ``value`` under ``key``; None where no short one does.

    >>> as_text("nics.bandwidth_bps", 400e9), as_text("latency_s", 3e-6), as_text("bucket_bytes", 25 * 2**20)
    ('400Gbps', '3us', '25MiB')
    >>> as_text("total_tokens", 300_000_000_000), as_text("bandwidth_bps", 1 / 3), as_text("seq", 8192)
    ('300B', None, None)
    """
    quantity = quantity_of(key)
    if quantity is None or isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    texts = []
    for unit in quantity.shown:
        number = Decimal(str(value)) / quantity.units[unit]
        text = f"{number.normalize():f}{unit}"
        if abs(number) >= 1 and len(text) <= _SHORT and number_of(text, quantity) == value:
            texts.append(text)
    return min(texts, key=len, default=None)


def read_number(text: str, quantity: WrittenUnits, file: str) -> float | int:
    """Return the number of an answer or option called ``file``, with or without a unit. Raises `InputError`.

    >>> read_number("1T", TOKENS, "--tokens"), read_number("4096", LENGTH, "--seq"), read_number("4_096", LENGTH, "")
    (1000000000000, 4096, 4096)
    """
    number = number_of(text, quantity)
    if number is not None:
        return number
    try:
        plain = float(text) if text.isascii() and not is_unusual(text) else math.nan
    except ValueError:
        plain = math.nan
    if not math.isfinite(plain):
        raise InputError(
            "is no number",
            file=file,
            found=brief(text),
            allowed=f"a number, or such as {quantity.example}",
            fix=usual_spelling(text),
        )
    return int(plain) if plain.is_integer() else plain

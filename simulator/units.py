"""Decimal and binary units, and how figures are printed. Everything inside the package is SI."""

from __future__ import annotations

KB, MB, GB, TB = 1e3, 1e6, 1e9, 1e12
KiB, MiB, GiB = 2**10, 2**20, 2**30
us, ms = 1e-6, 1e-3
Gbit = 1e9 / 8
TFLOP = 1e12

#: Of an element, by type.
DTYPE_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
FP32_BYTES = DTYPE_BYTES["fp32"]
#: Of an operand's element, of products in 4 bits too.
OPERAND_BYTES = {**DTYPE_BYTES, "fp4": 0.5}


def format_time(seconds: float) -> str:
    """Return a duration with the unit that leaves one to three digits before the point.

    >>> format_time(20.83), format_time(0.0042), format_time(3.1e-6), format_time(1e-12)
    ('20.83 s', '4.20 ms', '3.10 us', '0.00 s')
    """
    if abs(seconds) < 0.005 * us or abs(seconds) >= 1:
        return f"{seconds:.2f} s"
    if abs(seconds) >= ms:
        return f"{seconds / ms:.2f} ms"
    return f"{seconds / us:.2f} us"


def counted(number: int, noun: str, ending: str = "s") -> str:
    """Return a number with its noun, whose plural has ``ending``.

    >>> counted(1, "node"), counted(2048, "node"), counted(4, "micro-batch", "es")
    ('1 node', '2,048 nodes', '4 micro-batches')
    """
    return f"{number:,} {noun}{'' if number == 1 else ending}"


def format_bytes(nbytes: float) -> str:
    """Return bytes in decimal units (GB = 1e9), as network figures are given.

    >>> format_bytes(50331648)
    '50.3 MB'
    """
    for unit, size in (("TB", TB), ("GB", GB), ("MB", MB), ("kB", KB)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} B"


def format_gib(nbytes: float) -> str:
    """Return bytes in GiB (2**30), as device memory is reported; the little that would be 0.0 of them in MiB.

    >>> format_gib(85899345920), format_gib(3 * 2**20), format_gib(0)
    ('80.0 GiB', '3 MiB', '0.0 GiB')
    """
    if 0 < abs(nbytes) < 0.05 * GiB:
        return f"{nbytes / MiB:.0f} MiB" if abs(nbytes) >= 0.5 * MiB else f"{nbytes / KiB:.3g} KiB"
    return f"{nbytes / GiB:.1f} GiB"


def format_parameters(total: float, active: float) -> str:
    """
    >>> format_parameters(124_439_808, 124_439_808), format_parameters(46.7e9, 12.9e9)
    ('124 M parameters', '46.7 B parameters (12.9 B active)')
    """
    return f"{format_count(total)} parameters" + (f" ({format_count(active)} active)" if active != total else "")


def format_encoder(layers: int, images: int, patches_per_image: int) -> str:
    """
    >>> format_encoder(32, 1, 1024)
    'an encoder of 32 layers (1 image of 1,024 patches)'
    """
    patches = counted(patches_per_image, "patch", "es")
    return f"an encoder of {counted(layers, 'layer')} ({counted(images, 'image')} of {patches})"


def format_count(number: float) -> str:
    """A large number to three figures, in millions (M), billions (B) or trillions (T).

    >>> format_count(124e6), format_count(8.03e9), format_count(999.9e9), format_count(1.008e12)
    ('124 M', '8.03 B', '1.00 T', '1.01 T')
    """
    unit, size = ("T", 1e12) if number >= 999.5e9 else ("B", 1e9) if number >= 999.5e6 else ("M", 1e6)
    scaled = number / size
    return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f} {unit}"


def in_brackets(terms: str) -> str:
    """Return a sum as a factor: in brackets where it has several terms.

    >>> in_brackets("2 GPUs"), in_brackets("2 GPUs + 1 GPU")
    ('2 GPUs', '(2 GPUs + 1 GPU)')
    """
    return f"({terms})" if " + " in terms else terms

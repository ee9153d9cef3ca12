"""Compiles the event loop with the platform's C compiler. Imports nothing of the simulator, as builds have no more.

    python simulator/engine/compiled/build.py

compiles it in place.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
#: The library, beside this file.
LIBRARY = "loop.dll" if sys.platform == "win32" else "loop.so"
#: No product is fused with a sum: times are those of Python, bit for bit.
_OPTIONS = ("-std=c11", "-O2", "-shared", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden")


def sources() -> list[Path]:
    """Return the C files of the event loop."""
    return sorted([*FOLDER.glob("loop/*.c"), *FOLDER.glob("loop/*.h")])


def digest() -> str:
    """Return a digest of the sources, by which a library is told that was compiled from others."""
    content = b"".join(path.read_bytes() for path in sources())
    return hashlib.sha256(content).hexdigest()[:16]


def compiler() -> list[str] | None:
    """Return the command of a C compiler: what CC says, or the first that there is; None without one."""
    if command := os.environ.get("CC", "").split():
        return command
    return next(([name] for name in ("cc", "gcc", "clang") if shutil.which(name)), None)


def compile_loop(*options: str, library: Path = FOLDER / LIBRARY) -> Path:
    """Compile the event loop with further ``options``; return the library.

    Raises OSError where there is no compiler, and subprocess.CalledProcessError where it fails.
    """
    command = compiler()
    if command is None:
        raise FileNotFoundError("no C compiler: neither cc, gcc nor clang, and CC is not set")
    files = [str(path) for path in sources() if path.suffix == ".c"]
    compiled = library.with_name(f"{library.name}.{os.getpid()}")
    define = f'-DSOURCES="{digest()}"'
    subprocess.run([*command, *_OPTIONS, *options, define, "-o", str(compiled), *files, "-lm"], check=True)
    compiled.replace(library)  # at once, for whoever loads it meanwhile
    return library


if __name__ == "__main__":
    print(compile_loop())

"""Compiles the engine's event loop when the package is built. Without a C compiler it is as good, and slower."""

from __future__ import annotations

import subprocess
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags


class LoopBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the library into wheels, which are then of this platform; an editable installation has it in place."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the event loop before a wheel is put together."""
        try:
            library = _build_module(Path(self.root)).compile_loop()
        except (OSError, subprocess.CalledProcessError) as problem:
            self.app.display_warning(f"the compiled engine is left out, and the one in Python plays: {problem}")
            return
        if version == "standard":
            build_data["artifacts"].append(library.relative_to(Path(self.root).resolve()).as_posix())
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{_platform()}"


def _platform() -> str:
    """Return the tag of this platform: of Linux the plain one, as the library is of this machine's own C library."""
    return next(tag for tag in platform_tags() if not tag.startswith(("manylinux", "musllinux")))


def _build_module(root: Path) -> ModuleType:
    """Load the module that compiles. Its packages stay out, as a build does not have what they import."""
    spec = spec_from_file_location("loop_build", root / "simulator" / "engine" / "compiled" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

"""The framework key of a workload file: the software stack that trains the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from simulator.config.section import ShortSection
from simulator.frameworks import FRAMEWORKS

if TYPE_CHECKING:
    Name = str
else:
    # What is listed, so that a new framework needs no line here.
    Name = Literal[tuple(FRAMEWORKS)]


class FrameworkChoice(ShortSection):
    """The software stack that trains the model: whose kernels, gradient buffers, sends, host costs and defaults. A
    plain text means `name`."""

    text_means: ClassVar[str] = "name"

    name: Name = next(iter(FRAMEWORKS))
    """[megatron_core]"""
    version: Annotated[str, Field(pattern=r"^\d+(\.\d+)*$")] | None = None
    """in quotes, such as "2.8": defaults that were others then [null: the newest that is known]"""
    compile: bool = False
    """pytorch: under torch.compile [false]"""

    @property
    def title(self) -> str:
        """Return the name, with ``compiled`` behind a comma where it is, whatever the version."""
        return f"{self.name}, compiled" if self.compile else self.name

"""The framework key of a workload file: the software stack that trains the model."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from simulator.config.cuda_graphs import GraphPart
from simulator.config.section import AsTuple, ShortSection
from simulator.frameworks import FRAMEWORKS

if TYPE_CHECKING:
    FrameworkName = str
    GraphName = str
else:
    # What is listed, so that a new framework needs no line here.
    FrameworkName = Literal[tuple(FRAMEWORKS)]
    GraphName = Literal[tuple(part.value for part in GraphPart)]


def _numbered(version: str | None) -> str | None:
    if version is not None and not re.fullmatch(r"\d+(\.\d+)*", version):
        raise PydanticCustomError("version", 'must be a name such as "2.8", of numbers and dots')
    return version


class FrameworkChoice(ShortSection):
    """The software stack that trains the model: whose kernels, gradient buffers, sends, host costs and defaults. A
    plain text means `name`."""

    text_means: ClassVar[str] = "name"

    name: FrameworkName = next(iter(FRAMEWORKS))
    """[megatron_core]"""
    version: Annotated[str | None, AfterValidator(_numbered)] = None
    """in quotes, such as "2.8": defaults that were others then [null: the newest that is known]"""
    compile: bool = False
    """pytorch, hugging_face: under torch.compile [false]"""

    cuda_graphs: Annotated[tuple[GraphName, ...], AsTuple] = ()
    """megatron_core: parts of layers whose kernels the host launches by one call: a list of attn, mlp, moe_router,
    moe_preprocess, mamba; or full_iteration, all passes of a step [none]"""

    @property
    def whole_step_graph(self) -> bool:
        """Return whether one graph holds all passes of a step."""
        return GraphPart.WHOLE_STEP in self.cuda_graphs

    @property
    def layer_graphs(self) -> frozenset[str]:
        """Return the parts of layers that graphs hold."""
        return frozenset(self.cuda_graphs) - {GraphPart.WHOLE_STEP}

    @property
    def title(self) -> str:
        """Return the name, with ``compiled`` behind a comma where it is, whatever the version."""
        return f"{self.name}, compiled" if self.compile else self.name

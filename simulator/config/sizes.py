"""Whole numbers of workload files: sizes of models, and numbers of things that may be none."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from simulator.config.section import Integral

Size = Annotated[int, Field(ge=1, le=1_000_000_000), Integral]
Number = Annotated[int, Field(ge=0, le=1_000_000_000), Integral]

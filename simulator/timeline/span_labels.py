"""Labels of spans, which are written out where somebody asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import overload

import numpy as np

from simulator.arrays import Ints


class SpanLabels(Sequence[str]):
    """The label of each span: that of its ``step`` in ``labels``, so many micro-batches ``later``.

    ``later``: None where all are the steps' own. ``renumbered``: returns the label of the same step so many
    micro-batches later. It is asked once for each step and number.
    """

    def __init__(
        self, labels: Sequence[str], step: Ints, later: Ints | None, renumbered: Callable[[str, int], str]
    ) -> None:
        self._labels, self._step, self._later, self._renumbered = labels, step, later, renumbered

    @classmethod
    def written(cls, texts: Sequence[str]) -> SpanLabels:
        """Return the labels of spans whose texts are there already."""
        return cls(texts, np.arange(len(texts)), None, lambda text, _microbatches: text)

    def __len__(self) -> int:
        return len(self._step)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        return self._texts[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str) or not isinstance(other, Sequence):
            return NotImplemented
        return self._texts == tuple(other)

    def __hash__(self) -> int:
        return hash(self._texts)

    def select(self, span: Ints) -> SpanLabels:
        """Return the labels of these spans (by index) alone."""
        later = None if self._later is None else self._later[span]
        return SpanLabels(self._labels, self._step[span], later, self._renumbered)

    @cached_property
    def _texts(self) -> tuple[str, ...]:
        if self._later is None:
            return tuple(map(self._labels.__getitem__, self._step.tolist()))
        most = int(self._later.max(initial=0)) + 1
        distinct, number = np.unique(self._step * most + self._later, return_inverse=True)
        steps, later = (distinct // most).tolist(), (distinct % most).tolist()
        texts = [
            self._renumbered(self._labels[step], more) if more else self._labels[step]
            for step, more in zip(steps, later, strict=True)
        ]
        return tuple(map(texts.__getitem__, number.tolist()))

"""Output of ``nvidia-smi -q``: which GPUs a node has, and the PCIe link of each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from simulator.bounds import is_digits
from simulator.errors import InputError
from simulator.importers import imported
from simulator.importers.machine_facts import GpuFacts, MachineFacts
from simulator.importers.pci_ids import GPU_TYPES, type_of_product

FORM = "nvidia-smi -q"
_HEADER = re.compile(r"GPU [0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]\s*$")
_LANES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class _Gpu:
    """One GPU of the output: the line it begins in, and its values by the names of all sections above."""

    line: int
    values: dict[str, str] = field(default_factory=dict)

    def value(self, name: str) -> str:
        """Return the value of a key; empty where the output lacks it or says N/A."""
        text = self.values.get(name, "")
        return "" if text in ("N/A", "[N/A]", "Unknown") else text


def is_query(text: str) -> bool:
    """Return whether a text is of this format: a line names a GPU, and another its product."""
    lines = text.splitlines()
    return any(_HEADER.match(line) for line in lines) and any(line.strip().startswith("Product Name") for line in lines)


def read(text: str, path: Path) -> MachineFacts:
    """Return the GPUs of an output. Raises `InputError` where it ends before all GPUs that it counts."""
    gpus = list(_gpus(text))
    attached = re.search(r"^Attached GPUs\s*:\s*(\d{1,9})", text, flags=re.MULTILINE)
    if attached and int(attached[1]) != len(gpus):
        raise InputError(
            "ends before all attached GPUs", file=path, found=f"{len(gpus)} GPUs", allowed=f"{attached[1]} GPUs"
        )
    assumed: Counter[str] = Counter()
    types = [_type(gpu, assumed) for gpu in gpus]
    counts: dict[str, int] = {}
    for position, kind in enumerate(types):
        if kind in counts and types[position - 1] != kind:
            raise InputError(
                f"line {gpus[position].line}: GPUs of one type do not follow each other", file=path, found=kind
            )
        counts[kind] = counts.get(kind, 0) + 1
    links = [_link(gpu) for gpu in gpus]
    usual = _usual(links)
    facts = GpuFacts(types=counts, generation=usual[0], lanes=usual[1])
    odd_links = [(number, link) for number, link in enumerate(links) if None not in (*link, *usual) and link != usual]
    assumed.update(
        f"node.pcie: generation {usual[0]} x {usual[1]} lanes, as most; GPU {number} has generation {link[0]} x "
        f"{link[1]}, which overrides of a cluster file can say (link: node0.gpu{number}.pcie)"
        for number, link in odd_links
    )
    return MachineFacts(FORM, gpus=facts, assumed=tuple(assumed), left_out=tuple(_left_out(gpus)))


#: PCIe generation and lanes; None where the output does not say it.
_Link = tuple[int | None, int | None]


def _link(gpu: _Gpu) -> _Link:
    """Return the fastest PCIe link that a GPU and its slot can have."""
    generation = gpu.value("PCI/GPU Link Info/PCIe Generation/Max")
    width = re.match(r"\d{1,9}", gpu.value("PCI/GPU Link Info/Link Width/Max"))
    lanes = int(width[0]) if width else None
    return max(int(generation), 3) if is_digits(generation) else None, lanes if lanes in _LANES else None


def _usual(links: Sequence[_Link]) -> _Link:
    """Return the link that most GPUs have, of equally frequent ones the slowest; parts that none says are None."""
    counts = Counter(link for link in links if None not in link)
    if counts:
        return min(counts, key=lambda link: (-counts[link], link))
    generations = [generation for generation, _ in links if generation is not None]
    lanes = [width for _, width in links if width is not None]
    return min(generations, default=None), min(lanes, default=None)


def _gpus(text: str) -> Iterator[_Gpu]:
    """Yield the GPUs of an output; sections are told by how far a line is indented."""
    gpu: _Gpu | None = None
    above: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if _HEADER.match(line):
            if gpu is not None:
                yield gpu
            gpu, above = _Gpu(number), []
            continue
        if gpu is None or not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        above = [(depth, name) for depth, name in above if depth < indent]
        name, colon, value = (part.strip() for part in line.partition(":"))
        if colon:
            gpu.values["/".join([*(section for _, section in above), name])] = value
        else:
            above.append((indent, name))
    if gpu is not None:
        yield gpu


def _type(gpu: _Gpu, assumed: Counter[str]) -> str:
    """Return the type of a GPU by the numbers of its PCI device, which stand as one (0x233010DE), or by its name."""
    number = gpu.value("PCI/Device Id")
    device = re.fullmatch(r"0x([0-9A-Fa-f]{4})([0-9A-Fa-f]{4})", number)
    kind = GPU_TYPES.get(f"0x{device[2]}:0x{device[1]}".lower()) if device else None
    kind = kind or type_of_product(gpu.value("Product Name"))
    if kind is None:
        name = gpu.value("Product Name") or "without a name"
        assumed[f"node.gpus.type: {imported.NO_TYPE}, as {name} ({number or 'no Device Id'}) is not known here"] += 1
    return kind or imported.NO_TYPE


def _left_out(gpus: list[_Gpu]) -> Iterator[str]:
    """Yield what lowers the speed of GPUs and has no place in a cluster file."""
    counts: Counter[str] = Counter()
    for gpu in gpus:
        if gpu.value("MIG Mode/Current") == "Enabled":
            counts["MIG is enabled: a GPU is simulated whole"] += 1
        now, usual = (_watts(gpu.values, name) for name in ("Current Power Limit", "Default Power Limit"))
        now = now if now is not None else _watts(gpu.values, "Power Limit")
        if now is not None and usual is not None and now < usual:
            counts[f"power limit of {now:g} W, {usual:g} W by default: power.limit_w of a profile of your own"] += 1
    for text, count in counts.items():
        yield text if count == 1 else f"{text} ({count} times)"


def _watts(values: Mapping[str, str], name: str) -> float | None:
    """Return a power of the GPU in watts; its section is called otherwise in older drivers."""
    for section in ("GPU Power Readings", "Power Readings"):
        if match := re.match(r"(\d+(?:\.\d+)?) W", values.get(f"{section}/{name}", "")):
            return float(match[1])
    return None

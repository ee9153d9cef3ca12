"""Output of ``ibstat``: the ports of RDMA cards, InfiniBand or Ethernet, each with its rate."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from simulator.errors import InputError
from simulator.importers.machine_facts import MachineFacts, NicFacts
from simulator.input_files import brief

FORM = "ibstat"
#: Link layer -> transport of a fabric.
_TRANSPORTS = {"infiniband": "infiniband", "ethernet": "roce"}


@dataclass(frozen=True)
class _Port:
    """One port: the card's name, the line it begins in, whether it is up, Gb/s, and the transport over it."""

    card: str
    line: int
    up: bool
    rate_Gbps: float
    transport: str


def is_ibstat(text: str) -> bool:
    """Return whether a text is of this format, by the line that begins a card."""
    return re.search(r"^\s*CA '[^']+'", text, flags=re.MULTILINE) is not None


def read(text: str, path: Path) -> MachineFacts:
    """Return the network cards of an output: the fastest ports that are up, all of one kind.

    Slower ports are left out, as those of storage and management are. Raises `InputError` where no port is up.
    """
    ports = list(_ports(text, path))
    up = [port for port in ports if port.up]
    if not up:
        raise InputError("has no port that is Active", file=path, found=f"{len(ports)} ports, all down")
    kind = max(Counter((port.rate_Gbps, port.transport) for port in up).items(), key=lambda item: (item[0][0], item[1]))
    rate_Gbps, transport = kind[0]
    used = [port for port in up if (port.rate_Gbps, port.transport) == kind[0]]
    unused = [port for port in ports if port not in used]
    facts = NicFacts(
        names=tuple([port.card for port in used]),
        bandwidth_bps=rate_Gbps * 1e9,
        transport=transport,
        unused=tuple(dict.fromkeys(port.card for port in unused if port.card not in {one.card for one in used})),
    )
    return MachineFacts(FORM, nics=facts, left_out=tuple(map(_unused_port, unused)))


def _unused_port(port: _Port) -> str:
    if not port.up:
        return f"{port.card}: its port is not Active"
    return f"{port.card}: {port.rate_Gbps:g} Gb/s of {port.transport}, slower or of another kind than those that count"


def _ports(text: str, path: Path) -> Iterator[_Port]:
    """Yield the ports in order. Raises `InputError` with the line of a port that lacks its rate or link layer."""
    card, begun = "", 0
    values: dict[str, str] = {}
    for number, line in enumerate([*text.splitlines(), "CA 'end'"], 1):
        opening = re.match(r"\s*CA '([^']+)'", line)
        if opening or re.match(r"\s*Port \d+:\s*$", line):
            if begun:
                yield _port(card, begun, values, path)
            card, begun = (opening[1], 0) if opening else (card, number)
            values = {}
            continue
        name, colon, value = (part.strip() for part in line.partition(":"))
        if begun and colon:
            values[name] = value


def _port(card: str, line: int, values: dict[str, str], path: Path) -> _Port:
    rate = re.match(r"\d+(?:\.\d+)?", values.get("Rate", ""))
    transport = _TRANSPORTS.get(values.get("Link layer", "").lower())
    up = values.get("State") == "Active"
    if up and (rate is None or float(rate[0]) <= 0):
        raise InputError(f"line {line}: a port of {card} has no rate", file=path, found=brief(values.get("Rate")))
    if up and transport is None:
        allowed, layer = "InfiniBand, Ethernet", brief(values.get("Link layer"))
        raise InputError(
            f"line {line}: a port of {card} has no link layer known here", file=path, found=layer, allowed=allowed
        )
    return _Port(card, line, up, float(rate[0]) if rate else 0.0, transport or "")

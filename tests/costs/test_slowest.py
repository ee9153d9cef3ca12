"""Constants of a transport between GPUs of unlike types."""

from __future__ import annotations

from dataclasses import replace

from simulator.costs.slowest import slowest
from simulator.hardware.transport import Protocol, Transport

SIMPLE = Protocol(base_latency_s=4e-6, hop_latency_s=1e-6, bandwidth_fraction=1.0, half_bytes=1e5)
LL = Protocol(base_latency_s=1e-6, hop_latency_s=5e-7, bandwidth_fraction=0.5)
QUICK = Transport(
    kind="published",
    source="none",
    efficiency=0.9,
    copy_Bps=2e11,
    p2p_copy_Bps=3e11,
    peer_latency_s=1e-7,
    protocols={"ll": LL, "simple": SIMPLE},
    p2p={"simple": SIMPLE},
    in_switch=SIMPLE,
)


def test_every_constant_is_that_of_the_slower_one() -> None:
    """Here one has the lower bandwidth and the other the longer latency; h of the filling is a time too."""
    late = replace(SIMPLE, hop_latency_s=3e-6, half_bytes=4e5)
    narrow = replace(QUICK, efficiency=0.8, copy_Bps=5e11, p2p_copy_Bps=1e11, pat=False)
    other = replace(QUICK, peer_latency_s=2e-7, p2p={"simple": late})
    expected = replace(
        QUICK, efficiency=0.8, copy_Bps=2e11, p2p_copy_Bps=1e11, pat=False, peer_latency_s=2e-7, p2p={"simple": late}
    )
    assert slowest([narrow, other]) == slowest([other, narrow]) == expected


def test_protocols_are_those_that_all_have_and_a_part_that_one_lacks_is_lacking() -> None:
    """LL has no partner. What sums up in switches follows from other constants where one has none of its own."""
    plain = replace(QUICK, protocols={"simple": SIMPLE}, in_switch=None)
    for order in ([QUICK, plain], [plain, QUICK]):
        assert slowest(order).protocols == {"simple": SIMPLE}
        assert slowest(order).in_switch is None


def test_filling_that_goes_on_is_slower_than_filling_that_ends() -> None:
    ends, later = (replace(SIMPLE, full_bytes=full) for full in (1e6, 2e6))
    p2p = {"ends": {"simple": ends}, "later": {"simple": later}, "never": {"simple": SIMPLE}}
    of = {name: replace(QUICK, p2p=protocols) for name, protocols in p2p.items()}
    assert slowest([of["ends"], of["later"]]).p2p["simple"].full_bytes == 2e6
    assert slowest([of["ends"], of["never"]]).p2p["simple"].full_bytes is None
    assert slowest([of["never"], of["ends"]]).p2p["simple"].full_bytes is None

"""Costs of the last few profiles, with the kernels that were priced by them."""

from __future__ import annotations

from collections.abc import Mapping

from simulator.costs.costs import Costs
from simulator.frameworks import Framework
from simulator.hardware.profile import Profile
from simulator.hardware.stack import Stack
from simulator.recent import RecentValues

#: Most costs that are kept, each with `simulator.costs.costs.MOST_KERNELS` prices at most: 120 MB in all.
MOST_COSTS = 8
_recent = RecentValues[tuple[Costs, Mapping[str, Profile], Stack | None]](MOST_COSTS)


def recent_costs(profiles: Mapping[str, Profile], software: Framework, network: Stack | None) -> Costs:
    """Return `Costs.from_profiles`: those of earlier jobs where profiles and network are the very same objects.

    Points of a search then price a kernel once. What is kept holds profiles and network, so that no others have their
    ids.
    """
    key = tuple([(gpu, id(profile)) for gpu, profile in profiles.items()]), software, id(network)
    return _recent.get(key, 1, lambda: (Costs.from_profiles(profiles, software, network), dict(profiles), network))[0]

"""Profiles that tests of costs ask."""

from simulator.config import catalog
from simulator.config.profile import load_profile
from simulator.costs import Costs

PROFILES = catalog.names("profile")

PROFILE = {name: load_profile(name) for name in PROFILES}

COSTS = {name: Costs.from_profile(profile) for name, profile in PROFILE.items()}


def changed(data: dict, key: str, value: object) -> dict:
    *path, last = key.split(".")
    section = data
    for part in path:
        section = section[part]
    section[last] = value
    return data

"""Collective algorithms as plans of flows, and the transfers themselves on the clock."""

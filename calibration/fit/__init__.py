"""Fits of a calibration profile to measurements: each part of a profile is fitted by a module of its own."""

"""From measurements to a calibration profile: each part of a profile is fitted by a module of its own."""

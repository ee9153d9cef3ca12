"""The engine with its event loop compiled from C: the same programs, the same times."""

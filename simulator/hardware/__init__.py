"""Hardware as users describe it, in plain dataclasses: clusters, calibration profiles of GPUs, stacks.

`simulator.config` reads files into them; `simulator.cluster` and `simulator.costs` build what the engine works with.
"""

"""Measurements of GPUs, their links and their host: cases, how each is timed, and who watches over them.

A `Case` is one thing to measure; a module per kind of case lists its cases and turns one into `Work`, a call that can
be repeated; `Bench` times work. Each rank is an *agent* that starts a *worker*, which does the measuring. When a worker
fails or hangs, the agents stop all workers, record why, and start them anew behind the case at fault.
"""

"""Plans: how many GPUs a job needs, and which layout is the best on each number of them and each kind of hardware.

`entry.plan` is the whole of it. Every figure is of a simulated step. `gpu_counts` says which numbers of GPUs are tried,
`plan_rows` searches layouts on each.
"""

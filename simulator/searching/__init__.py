"""Search for the fastest layout of a workload on so many GPUs.

`entry.search` is the whole of it. A `space.LayoutSpace` lists layouts by its `dimensions`. `bounds` are what no step of
a layout stays below. `branch_and_bound` simulates in their order, until no layout that is left can be among the best.
"""

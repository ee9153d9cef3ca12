"""Many jobs that differ in a few keys: points, simulated by a runner, kept in a file, compared as a table.

`entry.sweep` is the whole of it. Its parts stand alone: `space.Space` lists points, `evaluation.evaluate` makes an
outcome of one, a `runner.Runner` hands out outcomes as they are ready, and a `store.Store` keeps them.
"""

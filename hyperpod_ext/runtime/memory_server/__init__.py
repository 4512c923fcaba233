"""The memory server: the process on each node that owns the memory tier.

The memory server creates shared memory, touches its pages, sends it to workers, and outlives the workers. After a
worker died, its successor can still read the snapshots that the worker sealed.
"""

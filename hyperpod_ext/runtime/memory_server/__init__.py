"""The per-node process that owns the memory tier.

The memory server creates shared memory, touches its pages, sends it to workers, and outlives them: a snapshot sealed by
a worker that died is still available to its successor.
"""

"""The memory server: the process on each node that owns the memory tier.

The memory server creates shared memory, allocates its pages in advance, passes its file descriptors to workers, and
outlives the workers. After a worker dies, the process that replaces it can read all snapshots that the dead worker
completed.
"""

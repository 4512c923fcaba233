"""The memory server: the process on each node that owns the memory tier.

The memory server creates shared memory for snapshots, allocates the memory's pages in advance, passes file descriptors
of the memory to workers, and outlives the workers. After a worker dies, the process that replaces it can read all
snapshots that the dead worker completed.
"""

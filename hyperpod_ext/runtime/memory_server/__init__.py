"""The per-node process that owns the memory tier.

It creates and pre-faults shared memory, hands it to workers, and outlives them: what a worker had
sealed when it died is still here for its successor.
"""

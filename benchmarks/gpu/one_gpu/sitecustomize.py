"""Gives each process a host id of its own: NCCL then lets several ranks use one GPU, as ranks of several nodes.

Python imports this at its start where this folder is in PYTHONPATH. `experiments/product.py` puts it there, for jobs of
the product, whose workers are forked, and for those of torchrun.
"""

import os


def _become_a_host() -> None:
    os.environ["NCCL_HOSTID"] = f"process{os.getpid()}"


_become_a_host()
os.register_at_fork(after_in_child=_become_a_host)

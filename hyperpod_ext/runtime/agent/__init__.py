"""The agent: the process on each node that starts workers, and replaces a dead worker while the others keep running.

`python -m hyperpod_ext.runtime.agent` has torchrun's flags. The agent never imports torch, because it must start fast,
and must respond fast while training uses every core.
"""

"""The agent: the process on each node that starts workers, and replaces one that dies while the others stay.

`python -m hyperpod_ext.runtime.agent` has torchrun's flags. It never imports torch, because it must start fast, and
must respond fast while training uses every core.
"""

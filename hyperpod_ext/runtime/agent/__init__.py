"""The agent: the process on each node that starts workers, and replaces a dead worker while other workers keep running.

`python -m hyperpod_ext.runtime.agent` accepts the flags of torchrun. The agent never imports torch, so that it starts
fast, and responds fast even while training uses every core.
"""

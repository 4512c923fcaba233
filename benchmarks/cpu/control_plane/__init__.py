"""The control plane's benchmark: the real coordinator in a process of its own, agents that are only their messages."""

"""For AWS's `hyperpodrun`: ranks are forked from a process in the pod that has already imported their modules."""

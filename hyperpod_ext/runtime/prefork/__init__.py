"""For AWS's `hyperpodrun`: ranks are forked from a server process in the pod that has done their imports already."""

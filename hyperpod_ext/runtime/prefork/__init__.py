"""Under AWS's `hyperpodrun`: a small process takes one from the pod's fork server, which has its imports done."""

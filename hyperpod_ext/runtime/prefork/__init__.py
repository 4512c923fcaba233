"""For AWS's `hyperpodrun`: a rank is forked from the pod's fork server, which has already done the rank's imports."""

"""Rules on the output of rank 0: the check whether a rule is broken, and the reading of rank 0's log for it."""

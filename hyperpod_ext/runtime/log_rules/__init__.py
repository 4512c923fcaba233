"""Rules on the output of rank 0: evaluation of the rules, and reading of rank 0's log for them."""

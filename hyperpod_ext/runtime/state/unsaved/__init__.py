"""Find and report objects of a training function that change from step to step but are in no snapshot."""

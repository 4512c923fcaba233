"""Opens, aborts and closes process groups of gloo and NCCL, and provides the store through which their ranks
connect."""

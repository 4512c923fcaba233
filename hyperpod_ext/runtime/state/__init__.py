"""What a worker keeps through a fault: its training state and progress, and whether replicas are equal."""

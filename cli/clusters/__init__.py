"""Commands that create, change, show and delete HyperPod clusters."""

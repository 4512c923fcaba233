"""Target `local`: the agents of a job run as processes of this machine, supervised by an engine process."""

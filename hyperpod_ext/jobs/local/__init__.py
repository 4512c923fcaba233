"""Target `local`: agents as processes of this machine, and the engine that supervises them."""

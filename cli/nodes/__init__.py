"""`hp-ext node`: what is done to nodes of a cluster, one file a subcommand."""

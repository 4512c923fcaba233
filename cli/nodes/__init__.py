"""`hp-ext node`: commands on nodes of a cluster, one file a subcommand."""

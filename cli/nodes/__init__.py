"""The commands `hp-ext node ...`, for nodes of a cluster. Each command has its own file."""

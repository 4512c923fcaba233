"""The checkpoint benchmark: our engine and its peers, each in processes of its own, asked in turn."""

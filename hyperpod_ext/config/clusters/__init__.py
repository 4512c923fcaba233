"""One cluster as its user writes it: its groups of machines, and the network and storage around them."""

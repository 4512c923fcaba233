"""Commands on one job of a cluster: what is around it, inside of it, and left of it."""

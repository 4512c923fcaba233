"""Commands on one job, from its spec to its end."""

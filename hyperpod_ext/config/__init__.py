"""What the user wants, as strict frozen pydantic models shared by laptop and container.

Import from the submodules: `config.job.JobConfig`, `config.cluster.ClusterConfig`, `config.load.load`.
"""

"""What the user wants, as strict frozen pydantic models shared by laptop and container.

Import from the submodules: `config.job.JobConfig`, `config.clusters.cluster.ClusterConfig`, `config.files.load.load`.
"""

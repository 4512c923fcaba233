"""Target `hyperpod-slurm`: one sbatch file with our agent, sent and followed by Slurm's own commands."""

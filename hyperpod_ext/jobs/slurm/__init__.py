"""Target `hyperpod-slurm`: one sbatch file with our agent, submitted and watched with Slurm's own commands."""

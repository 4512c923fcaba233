"""Target `hyperpod-slurm`: a job is one sbatch file, which is submitted and watched with Slurm's own commands."""

"""Chains of jobs: attempts one after another, on Slurm or on this machine. No torch."""

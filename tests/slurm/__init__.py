"""Chains on a real Slurm: a cluster of several nodes on this one machine."""

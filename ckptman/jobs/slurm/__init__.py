"""Slurm: its commands, its options, batch scripts, submission."""

"""Proofs that a checkpoint loads, on any number of ranks, and of what others wrote."""

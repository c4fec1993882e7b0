"""Arithmetic before a run: sizes, memory, costs, goodput, simulated failures. No I/O, no clock."""

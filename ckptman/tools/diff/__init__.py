"""What changed between two checkpoints."""

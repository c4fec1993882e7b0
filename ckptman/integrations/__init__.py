"""ckptman in the training loops of others. Each module imports its framework, and is imported by whom it serves."""

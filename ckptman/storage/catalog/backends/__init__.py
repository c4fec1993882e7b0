"""Where checkpoints are kept: a folder, an object store, a folder with tiers behind it."""

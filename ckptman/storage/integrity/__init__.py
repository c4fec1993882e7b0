"""Whether the bytes of a checkpoint are what was saved, and what it means where they are not."""

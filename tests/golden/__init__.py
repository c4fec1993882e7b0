"""Checkpoints as an earlier version wrote them: every later one has to read them, bit for bit."""

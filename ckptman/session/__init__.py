"""One attempt of a run: the claim on its root, what ranks agree on each step, what they measure, its end."""

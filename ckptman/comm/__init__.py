"""The ranks of a run and how they talk: a control group of their own, and what they find out of each other."""

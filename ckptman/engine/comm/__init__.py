"""How the ranks of a run communicate: a control group of their own, and what they find out of each other."""

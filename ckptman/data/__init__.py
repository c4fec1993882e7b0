"""Data that resumes where it was: the order of samples, and loaders whose position goes into a checkpoint."""

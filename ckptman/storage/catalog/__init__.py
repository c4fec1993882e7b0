"""What a root holds: the catalog of its checkpoints, who writes and reads, what is kept, what is deleted. No torch."""

"""What is on disk: names, manifest, durable file operations, commit, catalogue, deletion. No torch."""

"""What people ask about checkpoints, with torch: do they load, how do they differ, files for other programs."""

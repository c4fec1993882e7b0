"""What ckptman costs and how it compares; `make bench` runs all of it."""

"""Health: what GPUs and nodes say of themselves while a run trains."""

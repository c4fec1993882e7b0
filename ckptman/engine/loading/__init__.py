"""From a checkpoint to the state of an application: fit, read, exchange, check, apply."""

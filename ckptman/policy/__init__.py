"""Pure decisions: when to save, what to keep, whether to run again. No torch, no I/O, no clock, no environment."""

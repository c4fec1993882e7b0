"""From the state of an application to a checkpoint: preflight, plan, stage, write, gather, commit."""

"""The state of a training run over torch's distributed checkpoint: staging, storage, resharding, the Checkpointer."""

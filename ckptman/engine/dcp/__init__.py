"""Saves and loads by `torch.distributed.checkpoint` itself."""

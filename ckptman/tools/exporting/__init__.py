"""A checkpoint for other programs: safetensors, one file of torch.save, plain DCP."""

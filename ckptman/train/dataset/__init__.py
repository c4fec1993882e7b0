"""The data of the bundled loop: token files, the order of samples, batches."""

"""Objects and named tensors: modules, optimizers, plain values, shards, generators."""

"""The bundled training loop: config, data, model, parallelism, loop."""

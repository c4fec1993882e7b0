"""The format as data: names, manifest, index, chunk table, values, and the containers of others."""

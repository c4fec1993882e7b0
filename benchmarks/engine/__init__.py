"""The benchmark of the storage engine: bottom up state, cache, raw, contestants, team, one file a section, report."""

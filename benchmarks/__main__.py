"""python -m benchmarks: the whole campaign of the storage engine."""

from __future__ import annotations

from benchmarks.engine.campaign import main

if __name__ == "__main__":
    main()

"""The bundled loop with longer steps, none of which ends while a file is called hold: `paced.py SECONDS OPTIONS`."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ckptman
from ckptman.train.__main__ import main


class Paced(ckptman.Checkpointer):
    longer_seconds = 0.0

    def step(self, step: int, metrics: Mapping[str, Any] | None = None) -> str | None:
        time.sleep(self.longer_seconds)
        while Path("hold").exists():
            time.sleep(0.05)
        return super().step(step, metrics)


if __name__ == "__main__":
    Paced.longer_seconds = float(sys.argv[1])
    ckptman.Checkpointer = Paced  # type: ignore[misc]
    sys.exit(main(sys.argv[2:]))

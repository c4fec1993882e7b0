"""The bundled loop with longer steps, none of which ends while a file is called hold: `paced.py SECONDS OPTIONS`."""

import sys
import time
from pathlib import Path

import ckptman
from ckptman.train.__main__ import main


class Paced(ckptman.Checkpointer):
    longer_seconds = 0.0

    def step(self, step, metrics=None):
        time.sleep(self.longer_seconds)
        while Path("hold").exists():
            time.sleep(0.05)
        return super().step(step, metrics)


if __name__ == "__main__":
    Paced.longer_seconds = float(sys.argv[1])
    ckptman.Checkpointer = Paced
    sys.exit(main(sys.argv[2:]))

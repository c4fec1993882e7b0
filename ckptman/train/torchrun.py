"""`python -m ckptman.train.torchrun ...`: torchrun, with nodes to spare that wait until one is needed.

torchrun keeps more nodes than `--nnodes` asks for in reserve. But after the first restart one of them is still on the
list of those that ask to come in, which every torchrun takes for a reason to restart its ranks: for ever. Here those
for whom there is no place go back into the reserve, and are no reason.
"""

from __future__ import annotations

import sys

from ckptman._torch_compat import keep_spare_nodes_waiting, run_torchrun
from ckptman.errors import CkptmanError

if __name__ == "__main__":
    try:
        keep_spare_nodes_waiting()
        run_torchrun()
    except CkptmanError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)

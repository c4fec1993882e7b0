"""Nodes that had better not be used again: a run tells its chain, and later attempts leave them out."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from pathlib import Path

from ckptman.io.filesystem import DISK, Disk
from ckptman.runtime.outcome import OUTCOME_ENV

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_BESIDE, _LONGEST_REASON = ".node-", 500


def report_node(node: str, reason: str, environ: Mapping[str, str], disk: Disk = DISK) -> None:
    """Tell the chain that a node is bad, and why. Nothing where there is no chain. Raises: OSError.

    A batch script can do so too: `echo "why" > "$CKPTMAN_OUTCOME.node-$SLURMD_NODENAME"`. Any rank may call it.
    """
    asked_for = environ.get(OUTCOME_ENV)
    if asked_for and _NODE.fullmatch(node):
        disk.replace_file(Path(f"{asked_for}{_BESIDE}{node}"), reason[:_LONGEST_REASON].encode())


def reported_nodes(outcome: Path) -> dict[str, str]:
    """The nodes that an attempt reported beside its outcome, and why. Raises: OSError."""
    start = outcome.name + _BESIDE
    found = {}
    for path in sorted(outcome.parent.iterdir()):
        name = path.name.removeprefix(start)
        if path.name.startswith(start) and _NODE.fullmatch(name):
            with path.open("rb") as file:
                text = file.read(_LONGEST_REASON).decode(errors="replace")
            found[name] = " ".join(text.split()) or "it was reported"
    return found


def this_node(environ: Mapping[str, str]) -> str:
    """The name that Slurm, or else the machine, gives to the node of this process."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()

"""What a run says of itself: the events of its journal that a person wants to know, one line each.

They go to the logger "ckptman". Where nobody has configured logging they appear on standard error.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ckptman.errors import plain
from ckptman.policies.intervals import duration_text
from ckptman.policies.retention_rules import bytes_text
from ckptman.runtime.outcome import OUTCOME_ENV

LOGGER = logging.getLogger("ckptman")


class _Unconfigured(logging.Handler):
    """Writes to standard error, as long as a record reaches no handler but this one."""

    def emit(self, record: logging.LogRecord) -> None:
        reached = [*LOGGER.handlers, *(logging.root.handlers if LOGGER.propagate else [])]
        if reached == [self] and sys.stderr is not None:
            with contextlib.suppress(Exception):  # closed, or a terminal that is gone
                print(f"ckptman: {record.getMessage()}", file=sys.stderr, flush=True)


def show_by_default() -> None:
    """Have lines shown from level INFO on, unless logging was configured. Called when a run begins."""
    if not LOGGER.hasHandlers():
        LOGGER.addHandler(_Unconfigured())
        if LOGGER.level == logging.NOTSET:
            LOGGER.setLevel(logging.INFO)


def is_shown(level: int = logging.INFO) -> bool:
    """Return whether lines of a level are wanted. Takes no lock: a signal handler may ask."""
    return not LOGGER.disabled and max(LOGGER.getEffectiveLevel(), LOGGER.manager.disable + 1) <= level


def tell(line: str, level: int = logging.INFO) -> None:
    """Log one line, safe to print. Whatever a handler of the user raises stays here: it must not harm a save."""
    with contextlib.suppress(Exception):
        LOGGER.log(level, plain(line))


def tell_event(event: str, fields: Mapping[str, Any]) -> None:
    """Log what the journal was told, if it is news for people; `fields` as they are in the journal."""
    if event in _LINES:
        level, line = _LINES[event]
        with contextlib.suppress(Exception):  # a field that is not what it should be
            tell(line(fields), level)
            if parts := fields.get("parts"):
                took = (f"{part} {duration_text(seconds)}" for part, seconds in parts.items())
                tell(f"of these: {', '.join(took)}", logging.DEBUG)


def _restored(fields: Mapping[str, Any]) -> str:
    line = f"restored step {fields['step']} from {fields['path']} in {duration_text(fields['seconds'])}"
    if memory := fields.get("memory"):
        line = f"restored step {fields['step']} from memory in {duration_text(fields['seconds'])} ({memory})"
    if only := fields.get("only"):
        line = f"loaded {', '.join(only)} from {fields['path']} in {duration_text(fields['seconds'])}: starts at step 0"
    if missing := fields.get("missing"):
        line += f"; missing in it, and as before: {', '.join(missing)}"
    if unexpected := fields.get("unexpected"):
        line += f"; left in it: {', '.join(unexpected)}"
    return line


def _saved(fields: Mapping[str, Any]) -> str:
    waited = f"training waited {duration_text(fields['stall_seconds'])}"
    size, seconds = bytes_text(fields["bytes"]), duration_text(fields["seconds"])
    return f"saved step {fields['step']}, {size} in {seconds} ({waited}): {fields['reason']}"


def _memory_on(fields: Mapping[str, Any]) -> str:
    copies, nodes, lost = fields["copies"], fields["nodes"], fields["lost_nodes"]
    outlives = f"any {lost} of {nodes} nodes may be lost" if lost else "they outlive processes, and no node"
    return f"checkpoints in memory ({fields['path']}), each part on {copies} node{'s' * (copies > 1)}: {outlives}"


def _save_failed(fields: Mapping[str, Any]) -> str:
    who = f" on rank {fields['rank']}" if fields["rank"] >= 0 else ""
    return f"the save of step {fields['step']} failed{who}: {fields['cause']}"


def _nearly_full(fields: Mapping[str, Any]) -> str:
    free, needed = bytes_text(fields["free_bytes"]), bytes_text(fields["save_bytes"])
    return f"the disk is nearly full: {free} are free, and a save takes {needed}. Free some with ckptman prune"


def _finished(fields: Mapping[str, Any]) -> str:
    return f"finished after step {fields['step']}: exit code 0" + (", and the chain ends" if _in_chain() else "")


def _stopped(fields: Mapping[str, Any]) -> str:
    then = "which asks the chain for the next attempt" if _in_chain() else "start it again to go on"
    return f"stopped after step {fields['step']} ({fields['reason']}): exit code 75, {then}"


def _failed(fields: Mapping[str, Any]) -> str:
    # The error itself is raised, and a watchdog tells what it found.
    then = "; the chain decides whether there is a next attempt" if _in_chain() else ""
    return f"failed after step {fields['step']} with {fields['error']}{then}"


def _in_chain() -> bool:
    return bool(os.environ.get(OUTCOME_ENV))


_LINES: dict[str, tuple[int, Callable[[Mapping[str, Any]], str]]] = {
    "restored": (logging.INFO, _restored),
    "save_durable": (logging.INFO, _saved),
    "save_failed": (logging.WARNING, _save_failed),
    "drained": (
        logging.INFO,
        lambda fields: f"copied step {fields['step']} to {fields['tier']} in {duration_text(fields['seconds'])}",
    ),
    "disk_nearly_full": (logging.WARNING, _nearly_full),
    "memory_on": (logging.INFO, _memory_on),
    "tracker_failed": (logging.WARNING, lambda fields: f"{fields['tracker']}: {fields['cause']}"),
    "stop_asked": (logging.INFO, lambda fields: f"stopping after step {fields['step']}: {fields['reason']}"),
    "finished": (logging.INFO, _finished),
    "stopped": (logging.INFO, _stopped),
    "failed": (logging.ERROR, _failed),
}
"""Events by name, with their level. What is told by a warning, such as a checkpoint that was skipped, is not here."""

"""What people are told of a chain: lines in its log, and the notes of `ckptman submit --notify`, by its events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from ckptman.errors import CkptmanError, ConfigError
from ckptman.jobs.chain_record import Chain
from ckptman.runtime.journal import number_in, read_journal
from ckptman.runtime.notify import Notifier

Say = Callable[[str], None]
_REQUEUE_SECONDS = 3.0
_NOTIFIED, _FAILED = "notified", "notify failed"


def patient(say: Say) -> Say:
    """Return the same `say`, which does not mind that nobody can hear it: after a SIGHUP the terminal is gone."""

    def tell(text: str) -> None:
        with suppress(OSError):
            say(text)

    return tell


@contextmanager
def unrecorded(chain: Chain, what: str, say: Say, errors: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """Continue if something cannot be recorded, as on a full disk: the run may have room elsewhere."""
    try:
        yield
    except errors as error:
        why = getattr(error, "strerror", None) or error
        say(f"{what} cannot be recorded in {chain.folder}: {why}. The run goes on")


def check_notify(command: str | None) -> str:
    """Return the command of `--notify`, or "" without one. Raises: ConfigError."""
    if command is not None and (not command.strip() or "\0" in command):
        raise ConfigError(
            "--notify is empty: give a command for the shell, such as 'cat >> notes.jsonl', or leave it out"
        )
    return command or ""


@contextmanager
def notes_of(chain: Chain, command: str, say: Say) -> Iterator[None]:
    """Have `command` told of the events of a chain. The end of the block waits for it for some seconds."""
    if not command:
        yield
        return

    def failed(why: str) -> None:
        say(f"--notify failed ({why}): run it by hand to see why. The chain does not need it")
        chain.events.record(_FAILED, why=why)

    notifier = Notifier(command, failed, _told_before(chain))
    notes = _ChainNotes(chain, notifier)
    chain.events.listeners.append(notes.hear)
    try:
        yield
    finally:
        chain.events.listeners.remove(notes.hear)
        notifier.wait()


class _ChainNotes:
    def __init__(self, chain: Chain, notifier: Notifier) -> None:
        self._chain, self._notifier = chain, notifier

    def hear(self, event: str, fields: Mapping[str, Any]) -> None:
        """Tell of an event of the chain if it is news for people."""
        name, reason = self._chain.folder.name, str(fields.get("reason", ""))
        if event in ("finished", "stopped"):
            facts, _ = self._last(None)
            self._tell(event, f"chain {name} has {event}: {reason}", reason, facts)
        elif event in ("end", "found ended"):
            facts, bad_nodes = self._last(fields["attempt"])
            attempt = f"attempt {facts['attempt']} of chain {name}"
            for node, why in bad_nodes.items():
                self._tell("bad_node", f"{attempt}: node {node} is bad: {why}", f"{node}: {why}", facts)
            if fields["ending"] == "crashed":
                self._tell("crashed", f"{attempt} crashed: {reason}", reason, facts)
            if event == "end" and self._chain.spec.mode == "requeue":  # a job that requeues itself is killed soon
                self._notifier.wait(_REQUEUE_SECONDS)

    def _tell(self, event: str, line: str, reason: str, facts: Mapping[str, Any]) -> None:
        if self._notifier.tell(event, line, chain=str(self._chain.folder), reason=reason, **facts):
            self._chain.events.record(_NOTIFIED, of=event)

    def _last(self, number: int | None) -> tuple[dict[str, Any], Mapping[str, str]]:
        """Return what is on disk of an attempt, None for the last one, and its bad nodes."""
        facts: dict[str, Any] = {"attempt": number, "job_id": "", "step": 0, "root": ""}
        with suppress(CkptmanError, OSError):
            for begun in self._chain.attempts():
                if number in (None, begun.number):
                    facts |= {"attempt": begun.number, "job_id": begun.job_id}
            if (end := self._chain.ends().get(facts["attempt"])) is not None:
                return facts | {"step": end.step, "root": end.root}, end.bad_nodes
        return facts, {}


def _told_before(chain: Chain) -> dict[str, float]:
    """Return when earlier attempts told of each event, in unix seconds."""
    with suppress(CkptmanError, OSError):
        events = read_journal(chain.events.path)[0]
        return {str(each.get("of")): number_in(each["time"]) or 0.0 for each in events if each["event"] == _NOTIFIED}
    return {}

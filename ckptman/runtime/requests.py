"""Requests of `ckptman ask` to a run that trains: each is an empty file of the run, and its name is the request.

The name has the claim (see `catalog.writer_lock`) of the attempt that is asked, so that no later attempt takes the
request for its own, and no clocks are compared. The leader looks for requests in the thread that keeps its claim
fresh, and answers in the journal.
"""

from __future__ import annotations

import os
import pwd
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, get_args

from ckptman.errors import CkptmanError, NotFoundError
from ckptman.runtime.journal import Journal, read_journal
from ckptman.runtime.log import tell
from ckptman.storage.catalog.liveness import Owner
from ckptman.storage.catalog.writer_lock import Claim, root_error
from ckptman.storage.format.paths import (
    Ask,
    RequestName,
    is_like_request,
    journal_path,
    new_nonce,
    parse_request,
    request_path,
    run_folder,
)
from ckptman.storage.io.durable_files import DISK

LOOK_SECONDS = 1.0
_TAIL_BYTES = 512 * 1024
_DONE = {
    "save_durable": "saved",
    "save_failed": "failed",
    "stopped": "stopped",
    "finished": "finished",
    "failed": "failed",
}
"""Events of the journal that carry requests out, and the word for that in `answered`."""


class _Request(NamedTuple):
    what: Ask
    id: str
    by: str


class Requests:
    """The requests to this attempt. The leader has one, which hears what happens from the journal."""

    def __init__(self, claim: Claim, journal: Journal) -> None:
        self._claim, self._journal, self._lock = claim, journal, threading.Lock()
        self._waiting: list[_Request] = []
        self._saving: dict[int, list[_Request]] = {}
        self._has_ended = False
        self._left: set[str] = set()
        """Names of files that could not be removed."""
        journal.listeners.append(self._heard)
        claim.every(LOOK_SECONDS, self.look)

    @property
    def save(self) -> bool:
        """Whether a save is asked for and has not begun."""
        return any(each.what == "save" for each in self._waiting)

    @property
    def stop(self) -> Ask | None:
        """The request to stop, if there is one."""
        asked = {each.what for each in self._waiting}
        return "hold" if "hold" in asked else "stop" if "stop" in asked else None

    def look(self) -> None:
        """Take the pending requests, and drop those to other attempts. Never raises."""
        if self._has_ended:
            return  # whoever asks now finds that the attempt ends
        with suppress(CkptmanError, OSError):
            names = os.listdir(run_folder(self._claim.root))  # noqa: PTH208 names alone are wanted
            found = [name for name in names if is_like_request(name) and name not in self._left]
            others = [name for name in found if not self._take(name)]
            if others:
                self._claim.check()  # they are for the run that took the root over, if one did
                tell(f"dropped {', '.join(others[:3])}{', ...' * (len(others) > 3)}: not a request to this attempt")
            for name in others:
                self._remove(name)

    def _take(self, name: str) -> bool:
        """Take a request; False: it is not for this attempt."""
        request = parse_request(name)
        if request is None or request.claim != self._claim.owner.nonce:
            return False
        by = _user(run_folder(self._claim.root) / name)
        with self._lock:
            is_new = all(each.what != request.what for each in self._waiting)
            self._waiting.append(_Request(request.what, request.id, by))
        if is_new:
            tell(f"asked by {by}: {request.what} at the next step")
        self._remove(name)
        return True

    def _remove(self, name: str) -> None:
        try:
            DISK.remove_file(run_folder(self._claim.root) / name)
        except OSError:
            self._left.add(name)

    def _heard(self, event: str, fields: Mapping[str, Any]) -> None:
        """Answer what an event carries out. A save that begins is for all who asked before."""
        if event != "save_begun" and event not in _DONE:
            return
        step = fields["step"]
        with self._lock:
            if event == "save_begun":
                own = [each for each in self._waiting if each.what == "save"]
                self._saving[step] = self._saving.get(step, []) + own  # the step may be saved twice at once
                self._waiting = [each for each in self._waiting if each.what != "save"]
                return
            done = self._saving.pop(step, [])
            if event not in ("save_durable", "save_failed"):
                self._has_ended = True
                done = [*done, *self._waiting, *(each for saves in self._saving.values() for each in saves)]
                self._waiting, self._saving = [], {}
        for what in get_args(Ask):
            if own := [each for each in done if each.what == what]:
                by = sorted({each.by for each in own})
                ids = [each.id for each in own]
                self._journal.record("answered", sync=True, what=what, ids=ids, by=by, done=_DONE[event], step=step)


def leave(root: Path, what: Ask, owner: Owner) -> str:
    """Leave a request to the attempt that owns a root, and return its id. Raises: RootError."""
    request = RequestName(what, owner.nonce, new_nonce())
    try:
        DISK.create_file(request_path(root, request), b"")
    except OSError as error:
        raise root_error(root, "written", error) from error
    return request.id


def answer(root: Path, request: str) -> Mapping[str, Any] | None:
    """Return the event that answers a request, by its id; None: there is none yet. Raises: OSError."""
    try:
        events, _ = read_journal(journal_path(root), _TAIL_BYTES)
    except NotFoundError:
        return None
    answers = (each for each in reversed(events) if each["event"] == "answered")
    return next((each for each in answers if request in str(each.get("ids"))), None)


def _user(path: Path) -> str:
    with suppress(OSError):
        uid = path.lstat().st_uid
        with suppress(KeyError):
            return pwd.getpwuid(uid).pw_name
        return f"user {uid}"
    return "an unknown user"

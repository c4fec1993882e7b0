"""What a place that holds checkpoints offers, whatever it is: a folder, an object store, memory."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ckptman.errors import ConfigError, masked_address, plain
from ckptman.policies.retention_rules import Record, RetentionPolicy
from ckptman.storage.catalog.catalog import Entry, Until
from ckptman.storage.catalog.rollback_records import Rollback

if TYPE_CHECKING:
    from ckptman.storage.catalog.backends.copy_draft import CopyDraft
    from ckptman.storage.catalog.backends.copy_source import CopySource, SourceInfo

_URL = re.compile(r"(?P<protocol>[a-z][a-z0-9+.-]+)://?(?P<rest>[^/].*)", re.ASCII)
_MEANT = re.compile(r"[a-z][\w+.-]+:/{2,}|s3:", re.ASCII | re.IGNORECASE)


class Backend(Protocol):
    """A place that holds checkpoints, each a set of files below its name.

    The contract, which one suite of tests holds for every implementation:

    - A checkpoint becomes visible as a whole, durably, or not at all (see `receive`).
    - `list` says what is there now. What cannot be looked at raises, and is never "nothing there".
    - What has been listed can be read with `open` until a `prune` deletes it, which makes it invisible at once.

    Nothing above asks what kind a backend is. Only the leader of a run calls what changes something; every rank may
    `open`.
    """

    where: str
    """Its path or address, as messages and notes name it."""

    def list(self, *, abandoned: bool = False, step: int | None = None, until: Until | None = None) -> list[Entry]:
        """Return all entries, oldest commit first; with `abandoned` also those that a rollback left behind.

        `step` and `until` save work (see `Catalog.scan`); a backend may ignore them and return more.

        Raises: NotFoundError, RootError, CorruptError: nobody can tell what is there.
        """

    def open(self, entry: Entry) -> CopySource:
        """Open a complete entry for reading. Raises: NotFoundError (it is another by now), CorruptError, RootError."""

    def reading(self, entry: Entry, what: str) -> AbstractContextManager[None]:
        """Hold an entry until the block ends, so that no prune takes it. `what`: who reads, in words."""

    def receive(self, facts: SourceInfo) -> AbstractContextManager[CopyDraft]:
        """Begin a copy of what is described, or go on with one. Held until the block ends.

        Raises: ConfigError (such a one is not kept here), RootError, SourceError.
        """

    # What is beside the checkpoints.

    def read_note(self, name: str) -> bytes | None:
        """Return a small file of `.ckptman`; None where there is none. Raises: CorruptError, RootError."""

    def create_note(self, name: str, data: bytes) -> bool:
        """Write such a file where there is none, durably. False: there was one. Raises: OSError."""

    def write_note(self, name: str, data: bytes) -> None:
        """Write such a file in place of what is there, durably and as a whole. Raises: OSError."""

    def rollbacks(self) -> Sequence[Rollback]:
        """Return the rollbacks that are written down here. Raises: CkptmanError."""

    def copy_rollbacks(self, rollbacks: Sequence[Rollback]) -> None:
        """Write down those rollbacks that are not known here. Raises: CkptmanError, OSError."""

    # As a tier.

    def make_tier(self) -> None:
        """Make a new tier, below what has to be there already. Raises: RootError."""

    def check_there(self) -> None:
        """Look whether a tier that was made once can be asked. Raises: NotFoundError, RootError: a mount is away."""

    def settle(self) -> None:
        """Make durable what is visible: who made it visible may have been killed before. Raises: OSError."""

    def prune(self, policy: RetentionPolicy | None, is_meant: Callable[[Sequence[Record]], bool]) -> None:
        """Delete what a policy does not keep, and what crashes left.

        Args:
            policy: None keeps everything.
            is_meant: Asked with what is there whether the policy can be meant for it.
        Raises: CkptmanError, OSError.
        """


def open_backend(where: str | os.PathLike[str]) -> Backend:
    """Return the backend of a path or an address. Raises: ConfigError."""
    from ckptman.storage.catalog.backends.local import LocalBackend
    from ckptman.storage.catalog.backends.object_store import ObjectBackend

    url = find_url(os.fspath(where))
    return ObjectBackend(url) if url is not None else LocalBackend(Path(where))


def find_url(written: str) -> str | None:
    """The address of an object store, as in `s3://bucket/prefix`; None where this is a path. A path of Python has lost
    one of the slashes.

    Raises: ConfigError where nothing is written, or what is meant for an address and is none, or has a secret in it.
    """
    text = written.strip()
    if not text:
        raise ConfigError("a path is empty where a folder or an address is meant: is a variable not set?")
    if (_URL.match(text) or _MEANT.match(text)) and masked_address(text) != text:
        raise ConfigError(
            f"{plain(masked_address(text))} has a secret in it, and an address is shown and stored: take it out, and "
            f"give credentials in the environment, such as AWS_PROFILE, or in the file of the store, such as ~/.aws"
        )
    found = _URL.fullmatch(text)
    if found and found["protocol"] != "file":
        return f"{found['protocol']}://{found['rest'].rstrip('/')}"
    if _MEANT.match(text):
        raise ConfigError(
            f"{plain(text)} is no address such as s3://bucket/prefix: correct it (is a variable not set?). A folder is "
            f"named without a protocol, and one that has this very name is ./{plain(text)}"
        )
    return None


def check_folder(path: str | os.PathLike[str]) -> None:
    """Raises: ConfigError where a folder to save to is the address of an object store."""
    if (url := find_url(os.fspath(path))) is not None:
        raise ConfigError(
            f"{plain(url)} is an object store, and saves go to a folder: save to one, and have its checkpoints copied "
            f"there by tiers=[Tier({url!r})], or by ckptman copy"
        )

"""The retention policy that a run goes by, beside its checkpoints: `.ckptman/retention.json`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from ckptman.errors import ConfigError, CorruptError
from ckptman.policies.retention_rules import RetentionPolicy
from ckptman.policies.serialization import from_data, to_data
from ckptman.storage.format.manifest import parse_versioned
from ckptman.storage.format.paths import retention_path, run_folder
from ckptman.storage.format.sealed_json import seal, unseal
from ckptman.storage.io.durable_files import DISK
from ckptman.storage.io.safe_open import read_regular

AGAIN_SECONDS = 1.0
FORMAT_VERSION = 1
_MOST_BYTES = 1024 * 1024
_REMEDY = "say what to keep, with options such as --keep-last 3"


def write_policy(root: Path, policy: RetentionPolicy | None) -> None:
    """Store the policy of a run, where it is not the one that is stored. Raises: OSError. Called by the leader."""
    data = seal(json.dumps({"format_version": FORMAT_VERSION, **to_data(policy)}, indent=1).encode())
    path = retention_path(root)
    try:
        if read_regular(path, _MOST_BYTES) == data:
            return
    except (OSError, CorruptError):
        pass
    DISK.replace_file(path, data)


def read_policy(root: Path) -> RetentionPolicy | None:
    """The policy that a run stored; None: it keeps everything.

    Raises: ConfigError where none is stored, or none that can be applied without the run's own program.
    """
    path = retention_path(root)
    try:
        try:
            data = read_regular(path, _MOST_BYTES, remedy="remove it")
        except FileNotFoundError:  # a client may find none while another one replaces it
            if not run_folder(root).is_dir():
                raise
            time.sleep(AGAIN_SECONDS)
            data = read_regular(path, _MOST_BYTES, remedy="remove it")
        raw: dict[str, Any] = parse_versioned(path, unseal(path, data))
        return from_data(raw)
    except FileNotFoundError:
        raise ConfigError(f"no run stored with {root} what it keeps, so there are no rules: {_REMEDY}") from None
    except (ConfigError, CorruptError) as error:
        raise ConfigError(f"the rules that are stored in {path} cannot be used ({error}): {_REMEDY}") from None

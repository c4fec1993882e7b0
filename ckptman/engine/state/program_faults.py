"""What the program's own objects raise: it says so, by the object's name, and is held against no checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ckptman.errors import CkptmanError, ConfigError
from ckptman.storage.io.failure_cause import trouble_of_load


@contextmanager
def of_the_program(key: str, target: object, call: str, rank: int) -> Iterator[None]:
    """Around a call of an object of the program.

    Args:
        key: The object's key in the state.
        call: The method that is called.

    Raises: ConfigError, which names the object, for whatever it raises, errors of its own use of ckptman included. What
        says that memory is short or a device broken stays as it is.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if trouble_of_load(text, getattr(error, "errno", None)) in ("shortage", "device"):
            raise
        told = ConfigError(
            f"{key!r}: {type(target).__name__}.{call}() failed on rank {rank}: {text}. Correct it, and start the run "
            f"again: no checkpoint is to blame, and none was changed"
        )
        told.of_program = True
        raise told from error


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Have an error of which nobody knows yet whose fault it is say which tensor or object it is about."""
    try:
        yield
    except (CkptmanError, OSError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise RuntimeError(f"in {name} of the state, {type(error).__name__}: {error}") from error

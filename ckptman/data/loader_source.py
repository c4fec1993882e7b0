"""The loader of a program, which `MODULE:FUNCTION` makes."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from ckptman.errors import CkptmanError, ConfigError, NotFoundError

_WRITE = "write a function that makes the loader: def make_loader(num_workers): return DataLoader(...)"
_NOT_THEIRS = (str(Path(__file__).parents[1]), str(Path(os.__file__).parent), "site-packages", "<frozen")


class LoaderSource:
    """Calls a function for a loader with a given number of workers.

    The function returns a DataLoader, another iterable of batches, or a Dataset, which is wrapped in a DataLoader with
    this `batch_size`. `takes_workers`: whether the number of workers can be chosen; for a Dataset, known after `make`.
    """

    def __init__(self, name: str, function: Callable[..., object], batch_size: int = 32) -> None:
        self.name, self._function, self._batch_size = name, function, batch_size
        try:
            signature = inspect.signature(function)
            self.takes_workers = self._passes_workers = any(
                each.name == "num_workers" or each.kind == each.VAR_KEYWORD for each in signature.parameters.values()
            )
            signature.bind(**self._arguments(0))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{name}: {error}, and only num_workers is passed: write a function that calls it with all arguments, "
                f"def probed(num_workers): return {name.rpartition(':')[2]}(...)"
            ) from None

    def make(self, workers: int) -> Iterable[Any]:
        """Return a loader, with this number of workers if it can be chosen. Raises: ConfigError: it makes no loader."""
        from torch.utils.data import DataLoader, Dataset, IterableDataset

        made = self._function(**self._arguments(workers))
        is_plain = isinstance(made, Mapping | list | tuple | str | bytes | range)
        # The datasets of Hugging Face are not those of torch, which reads them nevertheless.
        if isinstance(made, Dataset) or (not is_plain and hasattr(made, "__getitem__") and hasattr(made, "__len__")):
            self.takes_workers = True
            shuffle = None if isinstance(made, IterableDataset) else True
            return DataLoader(made, self._batch_size, shuffle, num_workers=workers)  # type: ignore[arg-type]
        are_several = isinstance(made, list | tuple) and any(isinstance(each, DataLoader) for each in made)
        if are_several or isinstance(made, str | bytes | Mapping) or not isinstance(made, Iterable):
            raise ConfigError(
                f"{self.name} returns {type(made).__name__}, not a loader: return one DataLoader, Dataset or iterable "
                f"of batches"
            )
        return made

    def _arguments(self, workers: int) -> dict[str, int]:
        return {"num_workers": workers} if self._passes_workers else {}


def parse_source(written: str) -> tuple[str, str]:
    """Return module and function of `MODULE:FUNCTION`. Raises: ConfigError."""
    where, _, names = written.rpartition(":")
    is_named = where.endswith(".py") or all(each.isidentifier() for each in where.split("."))
    if not is_named or not all(each.isidentifier() for each in names.split(".")):
        raise ConfigError(f"MODULE:FUNCTION, such as train:make_loader or train.py:make_loader, not {written!r}")
    return where, names


def find_function(written: str) -> Callable[..., object]:
    """Import `MODULE:FUNCTION`, from the current directory too. MODULE may be the path of a file.

    Raises: ConfigError: it is not there; NotFoundError: no such file; CkptmanError: it cannot be imported.
    """
    where, names = parse_source(written)
    found: Any = _import(where)
    module = found.__name__
    for name in names.split("."):
        if not hasattr(found, name):
            own = [each for each, value in vars(found).items() if getattr(value, "__module__", None) == module]
            hint = _nearest(name, own) or (f"it has {', '.join(own[:8])}" if own else _WRITE)
            raise ConfigError(f"{where} has no {names}: {hint}")
        found = getattr(found, name)
    if not callable(found):
        raise ConfigError(f"{written} is of type {type(found).__name__}, not a function: {_WRITE}")
    return found  # type: ignore[no-any-return]


def _import(where: str) -> ModuleType:
    path = Path(where)
    is_file = where.endswith(".py")
    if is_file and not path.is_file():
        hint = _nearest(path.name, [each.name for each in path.parent.glob("*.py")]) or "check the path"
        raise NotFoundError(f"there is no file {where}: {hint}")
    sys.path[:0] = [str(path.parent.resolve()), str(Path.cwd())] if is_file else [str(Path.cwd())]
    try:
        return _import_file(path) if is_file else importlib.import_module(where)
    except SystemExit as error:
        raise CkptmanError(
            f"{where} ends itself when it is imported (exit code {error.code}): put the program under "
            f"if __name__ == '__main__':"
        ) from None
    except BaseException as error:  # noqa: BLE001 raised by somebody else's code
        remedy = "make it importable first"
        if isinstance(error, ModuleNotFoundError):
            if not is_file and f"{where}.".startswith(f"{error.name}."):
                hint = _nearest(where, [each.stem for each in Path().glob("*.py")]) or "give its path with .py"
                raise ConfigError(f"there is no module {where} in this folder or this Python: {hint}") from None
            remedy = f"install {error.name}, or run the probe in an environment that has it"
        elif "relative import" in str(error):
            remedy = "it is part of a package: name it as package.module:function, from the folder of the package"
        raise CkptmanError(f"{where} cannot be imported: {describe(error)}; {remedy}") from None


def _import_file(path: Path) -> ModuleType:
    # Workers that are spawned import it again by its name, if no other module has that name.
    is_taken = path.stem in sys.modules or path.stem in sys.stdlib_module_names
    name = f"probed_{path.stem}" if is_taken else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _nearest(name: str, there: list[str]) -> str | None:
    close = get_close_matches(name, there, 1)
    return f"did you mean {close[0]}?" if close else None


def describe(error: BaseException) -> str:
    """Return an error of the user's code in one line, with the file and line that raised it, even in a worker."""
    text = str(error)
    if "Original Traceback" in text:  # of a worker, as torch raises it again
        what = next(line for line in reversed(text.splitlines()) if line.strip())
        places = re.findall(r'File "(.+?)", line (\d+)', text)
    else:
        what = f"{type(error).__name__}: {next(iter(text.strip().splitlines()), '')}".rstrip(": ")
        places = [(each.filename, str(each.lineno)) for each in traceback.extract_tb(error.__traceback__)]
    theirs = [each for each in places if not any(part in each[0] for part in _NOT_THEIRS)]
    return what.strip() + (f" ({Path(theirs[-1][0]).name}:{theirs[-1][1]})" if theirs else "")

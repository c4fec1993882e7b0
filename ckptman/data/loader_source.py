"""The loader of a program that nobody has started: what `MODULE:FUNCTION` makes."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptman.errors import CkptmanError, ConfigError, NotFoundError

EXAMPLE = "MODULE:FUNCTION, such as train:make_loader or train.py:make_loader"
_WRITE = "write a function that makes the loader: def make_loader(num_workers): return DataLoader(...)"
_NOT_THEIRS = (str(Path(__file__).parents[1]), str(Path(os.__file__).parent), "site-packages", "<frozen")


class LoaderSource:
    """Makes the loader anew for each number of workers.

    Args:
        name: What messages call it.
        function: It takes `num_workers`, or nothing; returns a DataLoader, a Dataset, or another iterable of batches.
        batch_size: Of the DataLoader that a Dataset is wrapped in.

    Raises:
        ConfigError: It needs other arguments.
    """

    def __init__(self, name: str, function: Callable[..., object], batch_size: int = 32) -> None:
        self.name, self._function, self._batch_size = name, function, batch_size
        self.takes_workers = self._asks = False
        """Whether the number of workers can be chosen. Of what returns a Dataset, that is known when it was called."""
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # of a built-in: nobody knows
            return
        self.takes_workers = self._asks = any(
            each.name == "num_workers" or each.kind == each.VAR_KEYWORD for each in parameters
        )
        others = [
            each.name
            for each in parameters
            if each.default is each.empty
            and each.name != "num_workers"
            and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        ]
        if others:
            raise ConfigError(
                f"{name} needs arguments ({', '.join(others)}), and the probe knows none but num_workers: write a "
                f"function that calls it, def probed(num_workers): return {name.rpartition(':')[2]}(...)"
            )

    def make(self, workers: int) -> Iterable[Any]:
        """Return a loader with so many workers, if that can be chosen. Raises: ConfigError; CkptmanError: the function
        raised."""
        from torch.utils.data import DataLoader, IterableDataset

        try:
            made = self._function(**({"num_workers": workers} if self._asks else {}))
        except BaseException as error:  # noqa: BLE001 whatever it is, it is told
            raise CkptmanError(f"{self.name} with {_workers(workers)} raised {describe(error)}") from None
        if _is_dataset(made):
            self.takes_workers = True
            shuffle = None if isinstance(made, IterableDataset) else True
            return DataLoader(made, self._batch_size, shuffle, num_workers=workers)  # type: ignore[arg-type]
        if isinstance(made, list | tuple) and any(isinstance(each, DataLoader) for each in made):
            raise ConfigError(f"{self.name} returns {len(made)} loaders or values: return the one loader to measure")
        if isinstance(made, str | bytes | Mapping) or not isinstance(made, Iterable):
            what = "None" if made is None else f"a {type(made).__name__}"
            raise ConfigError(
                f"{self.name} returns {what}, not a loader: return a DataLoader or an iterable of batches"
            )
        return made


def find_function(written: str) -> Callable[..., object]:
    """Import what `MODULE:FUNCTION` names; the current folder counts, and MODULE may be the path of a file.

    Raises: ConfigError: it is not there; NotFoundError: no such file; CkptmanError: it cannot be imported.
    """
    where, names = parse_source(written)
    module = _import_file(Path(where)) if _is_path(where) else _import_module(where)
    found: Any = module
    for name in names.split("."):
        if not hasattr(found, name):
            theirs = [each for each, value in vars(found).items() if callable(value) and not each.startswith("_")]
            close = difflib.get_close_matches(name, theirs, 1)
            own = [each for each in theirs if getattr(getattr(found, each), "__module__", "") == module.__name__]
            hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(own[:8])}" if own else _WRITE
            raise ConfigError(f"{where} has no {names}: {hint}")
        found = getattr(found, name)
    if not callable(found):
        raise ConfigError(f"{written} is a {type(found).__name__}, not a function: {_WRITE}")
    return found  # type: ignore[no-any-return]


def parse_source(written: str) -> tuple[str, str]:
    """Return module and function of `MODULE:FUNCTION`. Raises: ConfigError."""
    where, _, names = written.rpartition(":")
    if not where or not all(each.isidentifier() for each in names.split(".")):
        raise ConfigError(f"{EXAMPLE}, not {written!r}")
    if not _is_path(where) and not all(each.isidentifier() for each in where.split(".")):
        raise ConfigError(f"{EXAMPLE}: {where!r} is no name of a module; of a file give the path, with its .py")
    return where, names


def describe(error: BaseException) -> str:
    """Return an error of somebody else's code in one line, with the place where it was raised, also in a worker."""
    text = str(error)
    if "Original Traceback" in text:  # as torch tells of a worker
        what = next(line for line in reversed(text.splitlines()) if line.strip())
        places = re.findall(r'File "(.+?)", line (\d+)', text)
    else:
        what = f"{type(error).__name__}: {next(iter(text.strip().splitlines()), '')}".rstrip(": ")
        places = [(each.filename, str(each.lineno)) for each in traceback.extract_tb(error.__traceback__)]
    theirs = [each for each in places if not any(part in each[0] for part in _NOT_THEIRS)]
    return what.strip() + (f" ({Path(theirs[-1][0]).name}:{theirs[-1][1]})" if theirs else "")


def _is_path(where: str) -> bool:
    return where.endswith(".py") or os.sep in where


def _is_dataset(made: object) -> bool:
    from torch.utils.data import Dataset

    # One of Hugging Face's is none of torch's, and is read as one all the same.
    looks_so = hasattr(made, "__getitem__") and hasattr(made, "__len__")
    return isinstance(made, Dataset) or (
        looks_so and not isinstance(made, Mapping | list | tuple | str | bytes | range)
    )


def _import_module(name: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return _imported(name, lambda: importlib.import_module(name))
    except ModuleNotFoundError as error:
        if error.name is None or not (name + ".").startswith(error.name + "."):
            raise _failed(name, error) from None
    beside = [each.stem for each in Path().glob("*.py")]
    close = difflib.get_close_matches(name, beside, 1)
    hint = f"did you mean {close[0]}?" if close else "give its path with .py, or start the probe where it is"
    raise ConfigError(f"there is no module {name} in this folder or this Python: {hint}")


def _import_file(path: Path) -> Any:
    if not path.is_file():
        close = difflib.get_close_matches(path.name, [each.name for each in path.parent.glob("*.py")], 1)
        raise NotFoundError(f"there is no file {path}: " + (f"did you mean {close[0]}?" if close else "check the path"))
    # Workers that are spawned import it by its name again; a name that is taken cannot be given to it.
    sys.path[:0] = [str(path.parent.resolve()), str(Path.cwd())]
    taken = path.stem in sys.modules or path.stem in sys.stdlib_module_names
    name = f"probed_{path.stem}" if taken else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file: give one whose name ends with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        _imported(str(path), lambda: spec.loader.exec_module(module))  # type: ignore[union-attr]
    except ModuleNotFoundError as error:
        raise _failed(str(path), error) from None
    return module


def _imported(name: str, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except ModuleNotFoundError:
        raise
    except SystemExit as error:
        raise CkptmanError(
            f"{name} ends itself when it is imported (exit code {error.code}): put what it does as a program under "
            f"if __name__ == '__main__':"
        ) from None
    except BaseException as error:  # noqa: BLE001 whatever it is, it is told
        raise _failed(name, error) from None


def _failed(name: str, error: BaseException) -> CkptmanError:
    remedy = "make it importable first"
    if isinstance(error, ImportError) and "relative import" in str(error):
        remedy = "it is part of a package: name it as package.module:function, from the folder of the package"
    elif isinstance(error, ModuleNotFoundError) and error.name:
        remedy = f"install {error.name}, or start the probe where it is"
    return CkptmanError(f"{name} cannot be imported: {describe(error)}; {remedy}")


def _workers(count: int) -> str:
    return f"{count} worker{'s' if count != 1 else ''}"


def is_used_up(loader: object) -> bool:
    """Return whether what was made can be iterated only once."""
    return isinstance(loader, Iterator)

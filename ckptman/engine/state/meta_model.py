"""A user's model without its memory: built on the meta device, for `ckptman plan`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch

from ckptman.errors import ConfigError
from ckptman.forecast.checkpoint_size import SavedTensor


def tensors_of(written: str, option: str = "--model") -> list[SavedTensor]:
    """Return the tensors of the model that `package.module:function` gives, called on the meta device, no arguments.

    Modules of the current folder can be named. Raises: ConfigError, whatever goes wrong there.
    """
    module_name, colon, name = written.partition(":")
    if not (colon and module_name and name):
        raise ConfigError(f"{option}: write it as package.module:function, not {written!r}")
    here = str(Path.cwd())
    added = here not in sys.path and "" not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        function = importlib.import_module(module_name)
        for part in name.split("."):
            function = getattr(function, part)
        if not callable(function):
            raise ConfigError(f"{option}: {written} is not a function, but a {type(function).__name__}")
        with torch.device("meta"):
            model = function()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{option}: {written} does not give a model ({type(error).__name__}: {error}): name a function of an "
            f"installed package or of this folder that takes no arguments, reads no files and returns an nn.Module; it "
            f"is called where tensors have no memory (the meta device)"
        ) from error
    finally:
        if added:
            sys.path.remove(here)
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"{option}: {written} returned a {type(model).__name__}: it has to return an nn.Module")
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        if torch.nn.parameter.is_lazy(each):
            raise ConfigError(
                f"{option}: {written}: {name} has no shape before its first input (a lazy module, such as LazyLinear): "
                f"give the module its sizes, or let the function call the model once"
            )
    found = _tensors(model)
    if not any(each.parameter and each.elements for each in found):
        raise ConfigError(f"{option}: {written} returned a {type(model).__name__} with no parameter that is trained")
    return found


def _tensors(model: torch.nn.Module) -> list[SavedTensor]:
    """As its state dict names them. What is tied is saved under each of its names, and has one optimizer state."""
    seen: set[int] = set()
    found = []
    for name, each in model.state_dict(keep_vars=True).items():
        if not isinstance(each, torch.Tensor):
            continue
        is_parameter, tied = isinstance(each, torch.nn.Parameter), id(each) in seen
        trained = is_parameter and each.requires_grad and not tied
        seen.add(id(each))
        found.append(SavedTensor(name, tuple(each.shape), each.dtype.itemsize, is_parameter, trained, tied))
    return found

"""The sizes of a user's model, built on the meta device, for `ckptman plan --model`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch

from ckptman.errors import ConfigError
from ckptman.forecast.scenario import Model


def model_of(written: str, moments: int) -> Model:
    """Return the sizes of the model that `package.module:function` returns, called without arguments.

    `moments`: tensors that the optimizer keeps for each trainable parameter. Modules in the current directory can be
    named. Raises: ConfigError, whatever goes wrong there.
    """
    module_name, colon, name = written.partition(":")
    if not (colon and module_name and name):
        raise ConfigError(f"--model: write it as package.module:function, not {written!r}")
    here = str(Path.cwd())
    added = here not in sys.path and "" not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        function = importlib.import_module(module_name)
        for part in name.split("."):
            function = getattr(function, part)
        with torch.device("meta"):
            model = function()  # type: ignore[operator]
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"--model: {written} does not give a model ({type(error).__name__}: {error}): name a function that takes "
            f"no arguments, reads no files and returns an nn.Module. It is called on the meta device, where tensors "
            f"have no memory"
        ) from error
    finally:
        if added:
            sys.path.remove(here)
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"--model: {written} returned a {type(model).__name__}: it has to return an nn.Module")
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        if torch.nn.parameter.is_lazy(each):
            raise ConfigError(
                f"--model: {written}: {name} has no shape before its first input (a lazy module, such as LazyLinear): "
                f"give the module its sizes, or let the function call the model once"
            )
    trained, others = list[torch.Tensor](), list[torch.Tensor]()
    frozen, seen = 0, set[int]()
    for each in model.state_dict(keep_vars=True).values():
        if not isinstance(each, torch.Tensor):
            continue
        # A tied parameter is saved under each of its names, and trained once.
        is_parameter = isinstance(each, torch.nn.Parameter) and id(each) not in seen
        seen.add(id(each))
        (trained if is_parameter and each.requires_grad else others).append(each)
        frozen += each.numel() if is_parameter and not each.requires_grad else 0
    parameters, size = sum(each.numel() for each in trained), sum(each.nbytes for each in trained)
    if not parameters:
        raise ConfigError(f"--model: {written} returned a {type(model).__name__} without a trainable parameter")
    return Model(
        title=f"{parameters:,} trained{f' and {frozen:,} frozen' if frozen else ''} parameters of {written}",
        parameters=parameters,
        parameter_bytes=size,
        moment_bytes=moments * size,
        frozen=frozen,
        other_bytes=sum(each.nbytes for each in others),
        tensors=len(trained),
        saved_tensors=(1 + moments) * len(trained) + len(others),
    )

"""All private names of torch that ckptman uses, each with what it is for. No other module imports any.

They are there from torch 2.11, the oldest version that ckptman runs on, to 2.15. Who adds support for another version
looks here first. What costs much to import is imported when it is called for.
"""

from __future__ import annotations

import io
import operator
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata as _dcp_metadata
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ckptman.errors import ConfigError, RankLostError

try:
    from torch._C import PyTorchFileReader as _PyTorchFileReader
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor as ShardedTensor
    from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
    from torch.distributed.checkpoint.state_dict import _get_fqns
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper as LocalShardsWrapper
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
    from torch.serialization import _get_layout
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
    from torch.utils._python_dispatch import transform_subclass as transform_subclass
except ImportError as error:
    raise ConfigError(
        f"torch {torch.__version__} lacks a part of it that ckptman uses ({error}): install a newer ckptman, or one of "
        f"torch 2.11 to 2.15"
    ) from error

# `ShardedTensor`: what FSDP1 gives. `LocalShardsWrapper`: a DTensor of several local shards, as torchrec has them.
# `is_traceable_wrapper_subclass`, `transform_subclass`: tensors that are made of others, such as torchao's.

StorageInfo = _StorageInfo
"""Where plain DCP says that a value lies: in the pickle of `.metadata`, so the class is part of the format."""
StoragePrefix = _StoragePrefix
"""What plain DCP's writer tells each rank: DCP hands it from the leader's plan to the ranks."""
MemoryFormatEncoding = _MEM_FORMAT_ENCODING
"""How `.metadata` says a memory format, and the name by which a pickle asks for it."""
MEMORY_FORMAT_ENCODING = (_dcp_metadata.__name__, "_MEM_FORMAT_ENCODING")
get_layout = _get_layout
"""What a pickle of torch asks for to make a `torch.layout`."""
full_names: Callable[[torch.nn.Module, str], set[str]] = _get_fqns
"""The names of a parameter in a state dict of DCP: without those of wrappers (DDP, compile, activation checkpoints)."""


def has_hidden_names(module: torch.nn.Module) -> bool:
    """Return whether a module in it leaves a part out of the names of its parameters (`full_names`)."""
    return any(
        isinstance(each, (DistributedDataParallel, FullyShardedDataParallel))
        or hasattr(type(each), "_fqn_modifiers")
        or not _WRAPPED.isdisjoint(each._modules)
        for each in module.modules()
    )


_WRAPPED = {"_orig_mod", "_checkpoint_wrapped_module"}
"""Under which names compile and activation checkpoints keep what they wrap."""
local_shape_and_offset = _compute_local_shape_and_global_offset
"""Which part of a DTensor a rank has, told from shape, mesh and coordinate alone."""


_VERSION = operator.attrgetter("_version")


def default_store() -> Any:
    """Return the store by which the ranks of the default process group have met: the only way to the others that needs
    no collective."""
    return dist.distributed_c10d._get_default_store()


def abort_default_group() -> None:
    """End what waits in the default process group, of a process that is about to be ended."""
    dist.distributed_c10d._abort_process_group()


def group_timeouts(backend: str) -> list[float]:
    """Return after how many seconds a collective is given up, for each process group of this rank that has a backend
    of that name, such as "nccl". A group of a mesh need not have the timeout of the default one."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    found = []
    for group in dist.distributed_c10d._world.pg_map:
        for pair in dist.get_backend_config(group).split(","):
            device, _, name = pair.partition(":")
            if name == backend:
                found.append(group._get_backend(torch.device(device)).options._timeout.total_seconds())
    return found


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """Return this rank's part of a DTensor as it is: `to_local()` would make a node of autograd, and wait."""
    return tensor._local_tensor


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return how often each tensor was changed, as torch counts it. Raises: RuntimeError (made in inference mode)."""
    return list(map(_VERSION, tensors))


def parameters_of(module: torch.nn.Module) -> Mapping[str, torch.Tensor | None]:
    """Return the very dict in which a module holds its own parameters."""
    return module._parameters


def buffers_of(module: torch.nn.Module) -> Mapping[str, torch.Tensor | None]:
    """Return the very dict in which a module holds its own buffers."""
    return module._buffers


_INSIDES = operator.itemgetter(
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks"
)


def insides_of(module: torch.nn.Module) -> tuple[Any, ...]:
    """Return what the state dict of a module follows from: the dicts of its own parameters, buffers and children, the
    names of buffers that are not saved, and its hooks. Raises: KeyError (a module that is not built as torch's)."""
    found: tuple[Any, ...] = _INSIDES(vars(module))
    return found


def is_hook_of_fsdp(hook: Any) -> bool:
    """Return whether a hook of a state dict is the one by which `fully_shard` puts back the sharded parameters."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp._fully_shard")


def has_state_dict_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has hooks that change its state dict."""
    return bool(optimizer._optimizer_state_dict_pre_hooks or optimizer._optimizer_state_dict_post_hooks)


def spec_of(tensor: DTensor) -> object:
    """Return mesh, placements and global shape of a DTensor."""
    return tensor._spec


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy many tensors by one call. Raises: RuntimeError, if torch does not copy one of them like that."""
    if targets:
        torch._foreach_copy_(targets, sources)


def is_overlapping(tensor: torch.Tensor) -> bool:
    """Return whether elements of a tensor certainly share memory, so that nothing can be copied into it."""
    return bool(torch._debug_has_internal_overlap(tensor) == 1)


def read_zip(stream: io.RawIOBase) -> Any:
    """Return torch's own reader of the archives that `torch.save` writes: what it finds in them is what a load does."""
    return _PyTorchFileReader(io.BufferedReader(stream))


def fake_tensors() -> Any:
    """Return the context in which tensors have shapes and no memory: `torch.save` writes their containers."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def unflattened(flat: dict[str, Any], mappings: Any) -> Any:
    """Return the nested state dict that DCP's planner has flattened."""
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

    return unflatten_state_dict(flat, mappings)


def make_dtensor(
    local: torch.Tensor, mesh: Any, placements: Any, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return a DTensor of a local part. `DTensor.from_local` and `DTensor()` import the compiler of torch when they
    are called first, on every rank.
    """
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = DTensorSpec(mesh, placements, TensorMeta(shape, stride, dtype))
    made: torch.Tensor = DTensor.__new__(DTensor, local, spec, requires_grad=False)
    return made


_REJOIN_SECONDS = 60.0


def keep_spare_nodes_waiting() -> None:
    """Have torchrun of this process keep nodes in reserve for whom there is no place, whatever list they are on, and
    end when too few nodes are left, instead of waiting ten minutes for more.

    Raises: ConfigError (this torch does it in another way).
    """
    try:
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
            DynamicRendezvousHandler,
            _Action,
            _RendezvousJoinOp,
        )

        join, waiting = _RendezvousJoinOp.__call__, DynamicRendezvousHandler.num_nodes_waiting
        reserve, give_up = _Action.ADD_TO_REDUNDANCY_LIST, _Action.ERROR_TIMEOUT
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"torch {torch.__version__} keeps nodes in reserve in a way that ckptman does not know ({error}): render "
            f"the batch script without spare_nodes"
        ) from error

    def is_full(state: Any, settings: Any) -> bool:
        return bool(state.complete and len(state.participants) >= settings.max_nodes)

    began: dict[int, float] = {}
    """When this one was seen to wait for others, by round."""

    def join_or_wait(self: Any, ctx: Any, deadline: float) -> Any:
        state = ctx.state
        if state.round and not state.complete and ctx.node in state.participants:
            # A new round begins when all of the last one have left it or are dead: who lives is here in a moment.
            since = began.setdefault(state.round, time.monotonic())
            if time.monotonic() > since + _REJOIN_SECONDS:
                return give_up
        if is_full(state, ctx.settings) and ctx.node in state.wait_list and not state.closed:
            state.wait_list.discard(ctx.node)
            return reserve
        return join(self, ctx, deadline)

    def nodes_with_a_place(self: Any) -> int:
        found = waiting(self)
        return 0 if is_full(self._state_holder.state, self._settings) else found

    setattr(_RendezvousJoinOp, "__call__", join_or_wait)  # noqa: B010 a type checker knows methods as fixed
    setattr(DynamicRendezvousHandler, "num_nodes_waiting", nodes_with_a_place)  # noqa: B010


def run_torchrun() -> None:
    """Run torchrun with the arguments of this process. Raises: SystemExit, RankLostError (the rendezvous is gone, or
    too few nodes are left)."""
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError
    from torch.distributed.run import main

    try:
        main()
    except RendezvousConnectionError:
        raise RankLostError(
            "the torchrun of the first node has ended, and the rendezvous with it: this one ends too"
        ) from None
    except RendezvousTimeoutError:
        raise RankLostError("fewer nodes came to the rendezvous than the run needs: the job ends") from None


def loads_itself(module: torch.nn.Module) -> bool:
    """Whether a module takes its part of a state dict by code that is not torch's."""
    owner = next(kind for kind in type(module).__mro__ if "_load_from_state_dict" in vars(kind))
    return not owner.__module__.startswith("torch.") or bool(module._load_state_dict_pre_hooks)


def takes_more(module: torch.nn.Module) -> bool:
    """Whether a load may hand a module entries that are neither parameters nor buffers: it has a load of its own, or
    hooks in it. Those that FSDP2 adds look at parameters alone."""
    hooks = [*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values()]
    return type(module)._load_from_state_dict is not torch.nn.Module._load_from_state_dict or not all(
        each.__module__.startswith("torch.distributed.fsdp._fully_shard") for each in hooks
    )

"""Who takes part: each saves a state into a folder that it makes, and loads it in place.

A save ends when the bytes are on storage. The harness flushes every file once more inside the measured time, which
costs those nothing that have done so and is what the others leave to the operating system.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import ckptman
from benchmarks.engine.raw import BUFFERED, DEVICE, RAW, Raw
from benchmarks.engine.state import State

Move = Callable[[State, Path], None]

CKPTMAN = "ckptman"
KEPT_WARM = "ckptman, kept warm"
CKPTMAN_IN_DCP = "ckptman in dcp.save/load"
CKPTMAN_ON_DCP = "ckptman, files of plain DCP"
DCP = "plain DCP"
DCP_BEST = "plain DCP, two writer threads"
TORCH = "torch.save/load"
DEVICE_ALONE = "device alone"
"""To or from one buffer that stays in the cache of the processor: no state is in memory."""


@dataclass(frozen=True)
class Contestant:
    """`reads`: whose files it loads, where not its own. `only_moves`: bytes, and not to where they belong."""

    name: str
    save: Move | None = None
    load: Move | None = None
    reads: str | None = None
    only_moves: bool = False

    @property
    def source(self) -> str:
        """Whose files it loads."""
        return self.reads or self.name


def _ckptman_save_in_dcp(state: State, folder: Path) -> None:
    dcp.save(state, storage_writer=ckptman.StorageWriter(folder))


def _ckptman_load_in_dcp(state: State, folder: Path) -> None:
    dcp.load(state, storage_reader=ckptman.StorageReader(folder))


def _dcp_save(state: State, folder: Path) -> None:
    dcp.save(state, checkpoint_id=folder)


def _dcp_save_best(state: State, folder: Path) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, thread_count=2, sync_files=True))


def _dcp_load(state: State, folder: Path) -> None:
    dcp.load(state, checkpoint_id=folder)


def _torch_save(state: State, folder: Path) -> None:
    folder.mkdir()
    torch.save(state, folder / "state.pt")


def _torch_load(state: State, folder: Path) -> None:
    _copy_in(torch.load(folder / "state.pt", map_location="cpu", weights_only=True), state)


def _safetensors_save(state: State, folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(state, folder / "state.safetensors")


def _safetensors_load(state: State, folder: Path) -> None:
    from safetensors.torch import load_file

    _copy_in(load_file(folder / "state.safetensors"), state)


def _torchsnapshot_save(state: State, folder: Path) -> None:
    from torchsnapshot import Snapshot, StateDict

    Snapshot.take(str(folder), {"state": StateDict(**state)})


def _torchsnapshot_load(state: State, folder: Path) -> None:
    from torchsnapshot import Snapshot, StateDict

    into = StateDict(**state)
    Snapshot(str(folder)).restore({"state": into})
    _copy_in({name: into[name] for name in state if into[name] is not state[name]}, state)


def _resiliency_save(state: State, folder: Path) -> None:
    from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
    from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
        save_state_dict_async_finalize,
        save_state_dict_async_plan,
    )

    join_alone()
    folder.mkdir()
    writer = FileSystemWriterAsync(str(folder), thread_count=2)
    planned = save_state_dict_async_plan(state, writer, None)
    write, _, arguments = writer.get_save_function_and_args()
    write(*arguments)
    save_state_dict_async_finalize(*planned[:3])


def join_alone() -> None:
    """A process group of this one process, for those that cannot do without."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _copy_in(loaded: State, state: State) -> None:
    for name, tensor in loaded.items():
        state[name].copy_(tensor)


def _raw(ways: list[Raw], reads: str) -> list[Contestant]:
    return [
        Contestant(each.name, each.save, each.load, reads, only_moves=each.direct or reads != RAW[0].name)
        for each in ways
    ]


_LIBRARIES = [
    Contestant(CKPTMAN, ckptman.save, ckptman.load),
    Contestant(CKPTMAN_IN_DCP, _ckptman_save_in_dcp, _ckptman_load_in_dcp, reads=CKPTMAN),
    Contestant(CKPTMAN_ON_DCP, None, _ckptman_load_in_dcp, reads=DCP),
    Contestant(DCP, _dcp_save, _dcp_load),
    Contestant(DCP_BEST, _dcp_save_best),
    Contestant(TORCH, _torch_save, _torch_load),
    Contestant("safetensors", _safetensors_save, _safetensors_load),
    Contestant("torchsnapshot", _torchsnapshot_save, _torchsnapshot_load),
    Contestant("nvidia-resiliency-ext", _resiliency_save),
]


def raw_loaders(reads: str) -> list[Contestant]:
    """Those that read from the page cache and check nothing."""
    return _raw(BUFFERED, reads)


def _device(reads: str) -> list[Contestant]:
    return [replace(each, name=each.name.replace("raw", DEVICE_ALONE)) for each in _raw(DEVICE, reads)]


SAVERS = [each for each in _LIBRARIES + _raw(RAW, RAW[0].name) + _device(RAW[0].name) if each.save]
WARM_LOADERS = [each for each in _LIBRARIES + raw_loaders(RAW[0].name) if each.load]
COLD_LOADERS = [each for each in _LIBRARIES + _raw(RAW, CKPTMAN) + _device(CKPTMAN) if each.load]
"""From a cold disk, raw reads are of the very file that ckptman reads: how fast a disk is depends on the place."""

"""What torch, as it is installed here, says of itself and of the devices that it sees."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TorchFacts:
    """What torch says of itself. `device`: cuda, rocm or cpu. `backends`: those of torch.distributed that it has.

    `problem`: why torch, or its devices, cannot be used; the rest may be empty then. `unanswered`: it was given up,
    after how long, and nothing is known.
    """

    version: str = ""
    device: str = "cpu"
    device_names: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    problem: str | None = None
    unanswered: str | None = None


def torch_facts() -> TorchFacts:
    """Version, devices and backends. Imports torch and wakes the driver: called in a process of its own.

    Where torch is not installed, a `TorchFacts` without a version; where it cannot be imported, one with the reason.
    """
    try:
        import torch
        import torch.distributed as dist

        names = ("gloo", "nccl", "mpi", "ucc", "xccl")
        backends = tuple(name for name in names if dist.is_available() and dist.is_backend_available(name))
        device = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"
        version = str(torch.__version__)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 (an installation that is broken raises anything, even SystemExit)
        missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        return TorchFacts(problem=None if missing else _reason(error))
    try:
        devices = tuple(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))
    except Exception as error:  # noqa: BLE001 (and so does a driver)
        return TorchFacts(version, device, (), backends, _reason(error))
    return TorchFacts(version, device, devices, backends)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]

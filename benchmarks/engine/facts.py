"""What machine, file system and versions a result belongs to."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import psutil
import torch

PEERS = ("safetensors", "torchsnapshot", "nvidia-resiliency-ext")


def facts(root: Path) -> dict[str, object]:
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "file_system": file_system(root),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("ckptman", "torch", "numpy", *PEERS)},
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average": os.getloadavg()[0],
    }


def file_system(path: Path) -> str:
    """Its type, by the longest mount point above the path."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    above = [(len(point), kind) for _, point, kind, *_ in mounts if path.resolve().is_relative_to(point)]
    return max(above)[1] if above else "unknown"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())

"""Runs a script of torchtitan without the accelerator that torchtitan asks for: what only one has is stood in for.

python torchtitan_on_cpu.py LOSSES SCRIPT ARGUMENT...

The loss of each step is appended to the file LOSSES, exactly.
"""

import runpy
import sys
from types import SimpleNamespace

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import create_block_mask
from torchtitan.tools import utils

utils.device_type = "cpu"
utils.device_module = SimpleNamespace(
    set_device=lambda device: None,
    device_count=lambda: 1,
    current_device=lambda: 0,
    get_device_name=lambda device: "CPU",
    get_device_properties=lambda device: SimpleNamespace(total_memory=2**33),
    memory_stats=lambda device: {},
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
    synchronize=lambda: None,
)

from torchtitan.components import metrics  # noqa: E402  they keep what `utils` has when they are imported
from torchtitan.models.common import attention  # noqa: E402


def causal_attention(q, k, v, *, scale, enable_gqa, **_):
    """Stand in for flex attention, which has no backward pass on a CPU. Documents are as long as sequences."""
    made = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
    return made, SimpleNamespace(lse=None)


if __name__ == "__main__":
    losses, script = sys.argv[1:3]
    log = metrics.MetricsProcessor.log

    def record(self, step, loss, *arguments, **named):
        with open(losses, "a") as file:
            file.write(f"{step} {loss.hex()}\n")
        log(self, step, loss, *arguments, **named)

    set_factor = FSDPModule.set_gradient_divide_factor

    def set_factor_and_sum(self, factor):
        set_factor(self, factor)
        self.set_force_sum_reduction_for_comms(True)  # gloo sums, and does not multiply

    if not hasattr(torch.distributed, "set_timeout"):  # before torch 2.15
        torch.distributed.set_timeout = lambda timeout, group: None
    FSDPModule.set_gradient_divide_factor = set_factor_and_sum
    metrics.MetricsProcessor.log = record
    attention.FlexAttention._compiled_flex_attn = causal_attention
    attention._compiled_create_block_mask = create_block_mask
    sys.argv = sys.argv[2:]
    runpy.run_path(script, run_name="__main__")

"""The optimizer step on real ranks: uneven shares give exactly the gradient of the global mean, on any mesh."""

import dataclasses
import os
import socket

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from ckptman.data.shuffle import largest_share, share
from ckptman.train.config import ModelConfig, OptimizerConfig, ParallelConfig
from ckptman.train.launch import ErrorReport, Launch
from ckptman.train.loop import accumulate_gradients, build_optimizer, build_scheduler, update
from ckptman.train.model import Decoder, init_weights, token_loss_sum
from ckptman.train.parallel import build_model, process_group
from tests.helpers.ranks import run_ranks

MODEL = ModelConfig(dim=18, layers=2, heads=3, kv_heads=1, ffn_dim=22)  # sizes that three ranks cannot share evenly
VOCAB = 31
SEQUENCE = 6
SEED = 7
CPU = torch.device("cpu")


def global_batch(samples):
    return torch.randint(VOCAB, (samples, SEQUENCE + 1), generator=torch.Generator().manual_seed(SEED))


def plain_gradients(samples):
    """Of the mean loss over the whole batch at once, with no sharding and no ranks."""
    model = Decoder(MODEL, VOCAB)
    init_weights(model, SEED)
    batch = global_batch(samples)
    loss = token_loss_sum(model(batch[:, :-1]), batch[:, 1:])
    (loss / (samples * SEQUENCE)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, loss.item()


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_step(world, parallel, samples, micro):
    model = build_model(MODEL, parallel, VOCAB, SEED, world)
    unsharded = Decoder(MODEL, VOCAB)
    init_weights(unsharded, SEED)
    for (name, sharded), whole in zip(model.named_parameters(), unsharded.parameters()):
        assert torch.equal(full(sharded), whole), f"{name} starts differently when sharded"

    start, end = share(samples, world.rank, world.size)
    mine = global_batch(samples)[start:end]
    count = -(-largest_share(samples, world.size) // micro)
    micro_batches = [mine[index * micro : (index + 1) * micro] for index in range(count)]
    loss_sum = accumulate_gradients(model, micro_batches, samples * SEQUENCE, world)
    dist.all_reduce(loss_sum)
    expected, expected_loss = plain_gradients(samples)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(
            full(parameter.grad), expected[name], rtol=2e-5, atol=1e-7, msg=f"gradient of {name}"
        )
    assert loss_sum.item() == pytest.approx(expected_loss, rel=1e-6)

    optimizer = build_optimizer(model, OptimizerConfig(warmup_steps=0))
    before = {name: full(p).clone() for name, p in model.named_parameters()}
    norm = update(model, optimizer, build_scheduler(optimizer, OptimizerConfig(), 10), clip_norm=0.1)
    expected_norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in expected.values()]))
    torch.testing.assert_close(norm, expected_norm, rtol=2e-5, atol=1e-7)
    assert all(p.grad is None for p in model.parameters())
    assert not any(torch.equal(before[name], full(p)) for name, p in model.named_parameters())


def test_a_process_without_a_launcher_is_a_world_of_one():
    parallel = ParallelConfig(device="cpu", compute_dtype="float32")
    with process_group(parallel, Launch(), CPU, 60, ErrorReport(Launch())) as world:
        assert (world.rank, world.size, world.mesh.mesh_dim_names) == (0, 1, ("replicate", "shard"))
        check_step(world, parallel, samples=5, micro=2)
    assert not dist.is_initialized()


def test_bf16_computes_in_bf16_and_keeps_master_weights_and_gradients_in_fp32():
    parallel = ParallelConfig(device="cpu", compute_dtype="bfloat16", activation_checkpointing=True)
    with process_group(parallel, Launch(), CPU, 60, ErrorReport(Launch())) as world:
        model = build_model(MODEL, parallel, VOCAB, SEED, world)
        assert model(global_batch(2)[:, :-1]).dtype == torch.bfloat16
        accumulate_gradients(model, [global_batch(2)], 2 * SEQUENCE, world)
        for name, parameter in model.named_parameters():
            assert "checkpoint" not in name
            assert parameter.dtype == torch.float32
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.float32


def as_rank(port):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # one that leaves before the other is connected breaks its connecting
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    parallel = ParallelConfig(device="cpu", compute_dtype="float32")
    launch = Launch(rank, world_size, rank, world_size, alone=False)
    with process_group(parallel, launch, CPU, 60, ErrorReport(launch)) as world:
        assert world.mesh.shape == (1, world_size)
        replicated = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "shard"))
        for mesh in (world.mesh, replicated):
            here = dataclasses.replace(world, mesh=mesh)
            check_step(here, parallel, samples=7, micro=2)
            check_step(here, parallel, samples=2, micro=4)  # the first rank has no sample at all


@pytest.mark.slow
def test_uneven_shares_on_three_ranks_give_the_gradient_of_the_global_mean():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run_ranks(3, as_rank, port, fresh=True)

"""The decoder, its size in figures, and its initial weights."""

import pytest
import torch

from ckptman.train.config import ModelConfig, OptimizerConfig
from ckptman.train.loop import build_optimizer, build_scheduler, learning_rate_factor
from ckptman.train.model import Decoder, init_weights, rotate, rotation_table, token_loss_sum
from ckptman.train.setup import flops_per_token, parameter_count, peak_tflops

SMALL = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48)
VOCAB = 70


def build(config=SMALL, recompute=False, seed=1):
    model = Decoder(config, VOCAB, recompute)
    init_weights(model, seed)
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_shapes_and_parameter_count(tied, kv_heads):
    config = SMALL.model_copy(update={"tied": tied, "kv_heads": kv_heads})
    model = build(config)
    assert model(torch.zeros(3, 5, dtype=torch.int64)).shape == (3, 5, VOCAB)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameter_count(config, VOCAB)
    assert ("head.weight" in model.state_dict()) is not tied
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}, "no buffers to save"


def test_a_published_size():
    """Llama 3 8B (dim 4096, 32 layers, 32 heads, 8 key-value heads, 14336 wide, 128256 tokens) has 8.03 billion."""
    llama = ModelConfig(dim=4096, layers=32, heads=32, kv_heads=8, ffn_dim=14336, tied=False)
    assert parameter_count(llama, 128_256) == 8_030_261_248
    assert flops_per_token(llama, 128_256, 8192) == pytest.approx(6 * 7.505e9 + 12 * 32 * 4096 * 8192, rel=1e-3)


def test_attention_is_causal():
    model = build()
    tokens = torch.randint(VOCAB, (1, 8), generator=torch.Generator().manual_seed(1))
    other = tokens.clone()
    other[0, 5] = (tokens[0, 5] + 1) % VOCAB
    first, second = model(tokens), model(other)
    assert torch.equal(first[:, :5], second[:, :5])
    assert not torch.equal(first[:, 5:], second[:, 5:])


def test_rotation_turns_by_relative_position():
    table = rotation_table(10, 8, 10_000.0, torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    query, key = (torch.randn(1, 1, 1, 8, generator=generator).expand(1, 1, 10, 8) for _ in range(2))
    scores = rotate(query, table)[0, 0] @ rotate(key, table)[0, 0].T
    torch.testing.assert_close(scores[3, 1], scores[9, 7])
    torch.testing.assert_close(rotate(query, table).norm(dim=-1), query.norm(dim=-1))
    assert rotate(query.bfloat16(), table).dtype == torch.bfloat16


def test_recomputing_activations_changes_no_bit_and_no_name():
    config = SMALL.model_copy(update={"dropout": 0.3})
    tokens = torch.randint(VOCAB, (2, 7), generator=torch.Generator().manual_seed(4))
    results = []
    for recompute in (False, True):
        model = build(config, recompute)
        torch.manual_seed(5)
        token_loss_sum(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        results.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert results[0].keys() == results[1].keys()
    for name, gradient in results[0].items():
        assert torch.equal(gradient, results[1][name]), name


def test_initial_weights_depend_on_seed_and_name_only():
    first, second, other = build(), build(), build(seed=2)
    for (name, one), two, three in zip(first.named_parameters(), second.parameters(), other.parameters()):
        assert torch.equal(one, two), name
        assert one.dim() == 1 or not torch.equal(one, three), name
    assert first.embedding.weight.std().item() == pytest.approx(0.02, rel=0.1)
    narrow = first.blocks[0].get_parameter("attention.out.weight")
    assert narrow.std().item() == pytest.approx(0.02 / 2, rel=0.1)
    assert torch.equal(first.norm.weight, torch.ones(32))


def test_only_matrices_decay():
    model = build()
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.5))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decay[id(p)] for name, p in model.named_parameters()} == {
        name: 0.0 if name.endswith("norm.weight") else 0.5 for name, _ in model.named_parameters()
    }


def test_the_schedule():
    config = OptimizerConfig(learning_rate=2.0, warmup_steps=4, final_fraction=0.1)
    assert [learning_rate_factor(step, config, 24) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert learning_rate_factor(4, config, 24) == 1.0
    assert learning_rate_factor(14, config, 24) == pytest.approx(0.55)
    assert learning_rate_factor(24, config, 24) == learning_rate_factor(99, config, 24) == pytest.approx(0.1)
    assert learning_rate_factor(0, OptimizerConfig(warmup_steps=0), 24) == 1.0
    optimizer = build_optimizer(build(), config)
    scheduler = build_scheduler(optimizer, config, 24)
    assert scheduler.get_last_lr() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-SXM-64GB", 358),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H20", 148),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L40", 181),
        ("AMD Instinct MI250X", 191.5),
        ("AMD Instinct MI250", 181),
        ("NVIDIA RTX A4000", None),
    ],
)
def test_peaks_by_name(name, peak):
    assert peak_tflops(name) == peak

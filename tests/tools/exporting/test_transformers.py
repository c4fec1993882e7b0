"""What `ckptman export` writes is what transformers loads: a small Llama of random weights, there and back."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import ckptman
from ckptman.cli.app import main


@pytest.fixture(scope="module")
def hub():
    """The library, imported where it is wanted: that takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TRANSFORMERS_VERBOSITY", "error")
        transformers = pytest.importorskip("transformers")
        transformers.utils.logging.disable_progress_bar()
        yield transformers


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def llama(request, hub, tmp_path):
    torch.manual_seed(0)
    config = hub.LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=request.param,
    )
    config.save_pretrained(tmp_path / "config")
    return hub.LlamaForCausalLM(config)


def trained(model, path):
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(5)[None]).logits.sum().backward()
    optimizer.step()
    ckptman.save({"model": model, "optimizer": optimizer, "epoch": 3}, path)
    return path


def same(found, model, dtype=torch.float32):
    expected = {name: each.to(dtype) for name, each in model.state_dict().items()}
    assert found.state_dict().keys() == expected.keys()
    for name, each in found.state_dict().items():
        assert each.dtype == dtype
        assert torch.equal(each, expected[name]), name
    if dtype == torch.float32:
        tokens = torch.arange(9)[None]
        assert torch.equal(found(tokens).logits, model(tokens).logits)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "dtype"), [("5GB", "float32"), ("20kB", "float32"), ("5GB", "bfloat16")])
def test_from_pretrained_has_every_weight(llama, hub, size, dtype, tmp_path):
    folder, out = trained(llama, tmp_path / "saved"), tmp_path / "out"
    options = ["--config", str(tmp_path / "config" / "config.json"), "--max-shard-size", size, "--dtype", dtype]
    assert main(["export", str(folder), str(out), *options]) == 0
    assert (out / "model.safetensors").exists() == (size == "5GB")
    kind = getattr(torch, dtype)
    found, told = hub.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype=kind)
    assert not any(told[each] for each in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    same(found, llama, kind)
    if llama.config.tie_word_embeddings:
        assert found.lm_head.weight is found.model.embed_tokens.weight


def test_the_files_are_those_that_transformers_itself_writes(llama, tmp_path):
    folder = trained(llama, tmp_path / "saved")
    llama.save_pretrained(tmp_path / "theirs", max_shard_size="20kB")
    options = ["--config", str(tmp_path / "theirs" / "config.json"), "--max-shard-size", "20kB"]
    assert main(["export", str(folder), str(tmp_path / "ours"), *options]) == 0
    ours, theirs = (
        json.loads((tmp_path / whose / "model.safetensors.index.json").read_text()) for whose in ("ours", "theirs")
    )
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]


def test_tied_weights_that_are_there_twice_load_too(llama, hub, tmp_path):
    folder = trained(llama, tmp_path / "saved")
    assert main(["export", str(folder), str(tmp_path / "out")]) == 0
    shutil.copy(tmp_path / "config" / "config.json", tmp_path / "out")
    same(hub.AutoModelForCausalLM.from_pretrained(tmp_path / "out"), llama)


def test_a_config_that_says_they_are_tied_does_not_drop_what_differs(tmp_path, capsys):
    model = {"lm_head.weight": torch.ones(2), "embed_tokens.weight": torch.zeros(2)}
    ckptman.save({"model": model}, tmp_path / "saved")
    config = tmp_path / "config.json"
    for text, code, told in (
        ('{"tie_word_embeddings": true}', 2, "lm_head.weight and embed_tokens.weight are not the same"),
        ("{", 2, "config.json that transformers wrote"),
        ("[]", 2, "config.json that transformers wrote"),
        (None, 3, "config.json"),
    ):
        config.unlink(missing_ok=True) if text is None else config.write_text(text)
        assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out"), "--config", str(config)]) == code
        assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_names_of_the_hub_are_what_a_new_model_writes(hub, tmp_path):
    """Mixtral has other names in memory than on the hub: the export has the former, and both load."""
    config = hub.MixtralConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=2,
    )
    config.save_pretrained(tmp_path / "config")
    model = hub.MixtralForCausalLM(config)
    folder = trained(model, tmp_path / "saved")
    ckptman.export(folder, tmp_path / "out", config=tmp_path / "config" / "config.json")
    ckptman.export(folder, tmp_path / "model.pt", format="torch")
    same(hub.AutoModelForCausalLM.from_pretrained(tmp_path / "out"), model)
    fresh = hub.AutoModelForCausalLM.from_config(hub.AutoConfig.from_pretrained(tmp_path / "config"))
    fresh.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    fresh.save_pretrained(tmp_path / "hub")
    model.save_pretrained(tmp_path / "theirs")
    names = {each: set(load_file(tmp_path / each / "model.safetensors")) for each in ("out", "hub", "theirs")}
    assert names["hub"] == names["theirs"]
    assert all("experts.gate_up_proj" not in name for name in names["hub"])
    assert "model.layers.0.mlp.experts.gate_up_proj" in names["out"]

"""Checkpoints as transformers writes and reads them, and an adapter trained on one."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
import transformers
from safetensors.torch import save_model

from cost_mtl.merging import CheckpointSource, TaskVector
from cost_mtl.merging.cli import main


@pytest.fixture
def gpt2(tmp_path, perturb):
    """A tiny GPT-2 (tied embeddings, Conv1D layers) and two fine-tunings, in two shards each, in bfloat16."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=16)
    base = transformers.GPT2LMHeadModel(config).to(torch.bfloat16)
    models = {"base": base, "one": perturb(base, 1), "two": perturb(base, 2)}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name, max_shard_size="10KB")
    return tmp_path, models


def test_a_sharded_checkpoint_is_merged_and_loads_again(gpt2):
    folder, models = gpt2
    shards = sorted(path.name for path in (folder / "base").glob("*.safetensors"))
    assert len(shards) >= 2
    argv = ["merge", "--base", str(folder / "base"), "--models", str(folder / "one"), str(folder / "two")]
    assert main([*argv, "--scale", "0.5", "--out", str(folder / "out"), "--quiet"]) == 0
    assert sorted(path.name for path in (folder / "out").glob("*.safetensors")) == shards
    index, original = (
        json.loads((folder / name / "model.safetensors.index.json").read_text()) for name in ("out", "base")
    )
    assert index == original
    loaded = transformers.GPT2LMHeadModel.from_pretrained(folder / "out")
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    tuned = [dict(models[name].named_parameters()) for name in ("one", "two")]
    for name, value in models["base"].named_parameters():
        change = sum(other[name].double() - value.double() for other in tuned)
        merged = dict(loaded.named_parameters())[name]
        assert merged.dtype == torch.bfloat16
        torch.testing.assert_close(merged, (value.double() + 0.5 * change).to(torch.bfloat16), rtol=0.01, atol=1e-3)


def test_another_dtype_is_what_the_configuration_says(gpt2):
    folder, _ = gpt2
    argv = ["merge", "--base", str(folder / "base"), "--models", str(folder / "one"), "--quiet"]
    for dtype in ("float16", "float32"):
        assert main([*argv, "--dtype", dtype, "--out", str(folder / dtype)]) == 0
        assert str(transformers.GPT2LMHeadModel.from_pretrained(folder / dtype).dtype) == f"torch.{dtype}"
        config, original = (json.loads((folder / name / "config.json").read_text()) for name in (dtype, "base"))
        assert config == original | {"dtype": dtype}


def test_the_file_and_the_live_model_are_one_base(gpt2):
    folder, models = gpt2
    from_files = TaskVector(folder / "base", folder / "one")
    live = TaskVector(models["base"], models["one"])
    assert set(from_files.blocks) == set(live.blocks)
    assert from_files.base_hash == live.base_hash
    merged = from_files.apply_to(models["base"])
    for name, value in models["one"].named_parameters():
        assert torch.equal(dict(merged.named_parameters())[name], value)


def test_a_file_that_kept_the_other_name_of_a_tie(gpt2, tmp_path):
    """safetensors' save_model keeps the first name in the alphabet, transformers another."""
    _, models = gpt2
    save_model(models["one"], str(tmp_path / "one.safetensors"))
    assert "lm_head.weight" in CheckpointSource(tmp_path / "one.safetensors", "one").infos
    tau = TaskVector(models["base"], tmp_path / "one.safetensors")
    assert torch.equal(tau.apply_to(models["base"]).lm_head.weight, models["one"].lm_head.weight)


def test_an_adapter_of_a_transformers_model(gpt2):
    import peft

    folder, _ = gpt2
    base = transformers.GPT2LMHeadModel.from_pretrained(folder / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["c_attn"], r=2))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder / "adapter")
    argv = ["merge", "--base", str(folder / "base"), "--models", str(folder / "adapter"), "--dtype", "float32"]
    assert main([*argv, "--out", str(folder / "out"), "--quiet"]) == 0
    merged = transformers.GPT2LMHeadModel.from_pretrained(folder / "out", dtype=torch.float32)
    expected = model.float().merge_and_unload()
    for name, value in expected.named_parameters():
        torch.testing.assert_close(dict(merged.named_parameters())[name], value, rtol=1e-5, atol=1e-5)

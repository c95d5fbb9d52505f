"""LoRA adapters as task vectors: against PEFT's own merge, and against the sum of the ΔW."""

from __future__ import annotations

import copy
import warnings

import peft
import pytest
import torch
from torch import nn

from cost_mtl.merging import TaskVector, task_arithmetic


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.first = nn.Linear(6, 8)
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.second = nn.Linear(32, 5)

    def forward(self, tokens):
        x = torch.tanh(self.first(self.embed(tokens)))  # [n, 8]
        return self.second(self.conv(x.view(-1, 1, 2, 4)).flatten(1))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def adapted(config, seed=1, model=None):
    """A PeftModel whose factors are not at their start."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(model or net(), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
                assert "original" not in name
    return model


def merged_by_peft(model):
    return copy.deepcopy(model).merge_and_unload().state_dict()


CONFIGS = {
    "linear": {"target_modules": ["first", "second"], "r": 2, "lora_alpha": 3},
    "patterns": {
        "target_modules": ["first", "second"],
        "r": 2,
        "rank_pattern": {"second": 3},
        "alpha_pattern": {"^first": 7},
    },
    "rslora": {"target_modules": ["first"], "r": 4, "use_rslora": True},
    "conv": {"target_modules": ["conv"], "r": 2},
    "embedding": {"target_modules": ["embed"], "r": 2},
    "saved module": {"target_modules": ["first"], "r": 2, "modules_to_save": ["second"]},
    "all biases": {"target_modules": ["first"], "r": 2, "bias": "all"},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("stored", [True, False], ids=["folder", "live"])
def test_is_what_peft_merges(tmp_path, name, stored):
    model = adapted(peft.LoraConfig(**CONFIGS[name]))
    expected = merged_by_peft(model)
    if stored:
        model.save_pretrained(tmp_path / "adapter")
    tau = TaskVector(net(), tmp_path / "adapter" if stored else model)
    merged = tau.apply_to(net().state_dict())
    assert merged.keys() == expected.keys()
    assert tau.norm() > 0.1
    for key, value in expected.items():
        torch.testing.assert_close(merged[key], value, rtol=1e-5, atol=1e-6)


def test_two_adapters_add_up_in_delta_w_not_in_factors():
    one, two = (adapted(peft.LoraConfig(target_modules=["first"], r=2), seed) for seed in (1, 2))
    delta = {
        number: model.base_model.model.first.get_delta_weight("default").detach()
        for number, model in enumerate((one, two))
    }
    merged = task_arithmetic(net().state_dict(), [one, two], [0.7, 0.4])
    expected = net().first.weight.data + 0.7 * delta[0] + 0.4 * delta[1]
    torch.testing.assert_close(merged["first.weight"], expected, rtol=1e-5, atol=1e-6)
    # What averaging the factors would have given instead.
    factors = [
        [m.base_model.model.first.lora_A["default"].weight, m.base_model.model.first.lora_B["default"].weight]
        for m in (one, two)
    ]
    a, b = ((0.7**0.5) * x + (0.4**0.5) * y for x, y in zip(*factors, strict=True))
    wrong = (b @ a * one.base_model.model.first.scaling["default"]).detach()
    right = 0.7 * delta[0] + 0.4 * delta[1]
    assert (wrong - right).norm() / right.norm() > 0.3


def test_adapters_of_different_modules_and_a_full_model_mix(perturb):
    base = net()
    one = adapted(peft.LoraConfig(target_modules=["first"], r=2))
    two = adapted(peft.LoraConfig(target_modules=["second"], r=2))
    tuned = perturb(base, 3)
    merged = task_arithmetic(base, [one, two, tuned], 0.5)
    expected = merged_by_peft(one)["first.weight"] - base.first.weight + tuned.first.weight - base.first.weight
    torch.testing.assert_close(merged.first.weight.data, (base.first.weight + 0.5 * expected).detach())


def test_fan_in_fan_out():
    """GPT-2's Conv1D keeps its weight transposed; a square one would not show a mistake by its shape."""
    from transformers.pytorch_utils import Conv1D

    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Conv1D(6, 6)

        def forward(self, x):
            return self.layer(x)

    model = adapted(peft.LoraConfig(target_modules=["layer"], r=2, fan_in_fan_out=True), model=Transposed())
    expected = merged_by_peft(model)["layer.weight"]
    base = model.base_model.model.layer.base_layer.weight.data.clone()
    tau = TaskVector({"layer.weight": base, "layer.bias": torch.zeros(6)}, model)
    torch.testing.assert_close(
        tau.apply_to({"layer.weight": base, "layer.bias": torch.zeros(6)})["layer.weight"], expected
    )


def test_half_precision_factors_are_multiplied_in_float32():
    model = adapted(peft.LoraConfig(target_modules=["first"], r=2), model=net().bfloat16())
    layer = model.base_model.model.first
    for factor in (layer.lora_A, layer.lora_B):
        factor["default"].to(torch.bfloat16)
    a, b = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
    tau = TaskVector(net().bfloat16(), model).blocks["first.weight"]
    torch.testing.assert_close(tau.double(), (b @ a * layer.scaling["default"]).detach(), rtol=1e-6, atol=1e-7)


REFUSED = {
    "DoRA": (peft.LoraConfig(target_modules=["first"], use_dora=True), "got one with use_dora"),
    "PiSSA": (
        peft.LoraConfig(target_modules=["first"], init_lora_weights="pissa"),
        "keeps the base's weights, got 'pissa'",
    ),
    "another method": (
        peft.IA3Config(target_modules=["first"], feedforward_modules=[]),
        "expected a LoRA adapter, got IA3",
    ),
    "LoHa": (peft.LoHaConfig(target_modules=["first"]), "expected a LoRA adapter, got LOHA"),
    "bias of a factor": (
        peft.LoraConfig(target_modules=["first"], lora_bias=True),
        "expected tensors of a plain LoRA, got .*lora_B.bias'",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_plain_lora_is_refused(tmp_path, case):
    config, message = REFUSED[case]
    peft.get_peft_model(net(), config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=f"finetuned: .*{message}.*merge_and_unload"):
        TaskVector(net(), tmp_path / "adapter")


def test_grouped_convolutions_are_refused(tmp_path):
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapter = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules=["0"], r=2))
    with pytest.raises(ValueError, match=r"factors of one rank|grouped convolution"):
        TaskVector(model, adapter)


def test_another_base_is_an_error(tmp_path, mlp):
    adapted(peft.LoraConfig(target_modules=["first"], r=2)).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"got one that changes 'first\.weight', which base does not have"):
        TaskVector(mlp, tmp_path / "adapter")
    wider = net()
    wider.first = nn.Linear(6, 9)
    with pytest.raises(
        ValueError, match=r"'first\.weight': expected a ΔW of the weight's shape \[9, 6\], got \[8, 6\]"
    ):
        TaskVector(wider, tmp_path / "adapter")


def test_a_folder_without_weights(tmp_path):
    adapted(peft.LoraConfig(target_modules=["first"], r=2)).save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="adapter_model"):
        TaskVector(net(), tmp_path / "adapter")
    with pytest.raises(ValueError, match="expected a whole model, got the PEFT adapter"):
        TaskVector(tmp_path / "adapter", net())


@pytest.mark.parametrize("content", ["{", "{}", '{"peft_type": "NO SUCH METHOD"}', "[]"])
def test_a_damaged_configuration(tmp_path, content):
    adapted(peft.LoraConfig(target_modules=["first"], r=2)).save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_config.json").write_text(content)
    with pytest.raises(
        ValueError, match=r"finetuned: (expected a readable .*adapter_config\.json|expected a LoRA adapter)"
    ):
        TaskVector(net(), tmp_path / "adapter")


def test_exclude_applies_to_adapters(tmp_path):
    model = adapted(peft.LoraConfig(target_modules=["first", "second"], r=2))
    assert list(TaskVector(net(), model, exclude=["second.*"]).blocks) == ["first.weight"]
    with pytest.raises(ValueError, match="got one that changes none"):
        TaskVector(net(), model, exclude=["*"])

"""What peft knows of an adapter is asked of peft, layer by layer: its own merge is the reference, or a refusal."""

from __future__ import annotations

import copy
import json

import peft
import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrize
from transformers.pytorch_utils import Conv1D

from cost_mtl.merging import AnisotropicScaling, TaskVector, task_arithmetic

pytestmark = pytest.mark.filterwarnings("ignore")


class Mixed(nn.Module):
    """Conv1D and Linear layers, square and not, an embedding and a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.c_proj, self.c_attn = Conv1D(6, 6), Conv1D(9, 6)
        self.square, self.wide, self.bare = nn.Linear(6, 6), nn.Linear(6, 9), nn.Linear(9, 9, bias=False)
        self.norm = nn.BatchNorm1d(9)
        self.attention = nn.MultiheadAttention(6, 2)

    def forward(self, tokens):
        x = self.square(self.c_proj(self.embed(tokens)))
        return self.norm(self.bare(self.wide(x) + self.c_attn(x)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)))


def mixed() -> Mixed:
    torch.manual_seed(0)
    return Mixed()


def tied() -> Tied:
    torch.manual_seed(0)
    return Tied()


def moved(model, seed=1):
    """All that is trainable away from its start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def adapted(base, **settings):
    return moved(peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=2, **settings)))


def is_peft_merge(base, adapter, model):
    """Whether the base plus the adapter's vector is what peft's own merge of the live model gives."""
    expected = copy.deepcopy(model).merge_and_unload().state_dict()
    got = TaskVector(base, adapter).apply_to(copy.deepcopy(base))
    got = got.state_dict() if isinstance(got, nn.Module) else got
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=1e-5, atol=1e-6)
    before = base.state_dict() if isinstance(base, nn.Module) else base
    assert any(not torch.equal(got[key], before[key]) for key in got)


# ------------------------------------------------------------------------------------------------ which way round


TARGETS = [["c_proj"], ["square"], ["c_proj", "square"], ["square", "c_attn"], ["c_attn", "c_proj", "wide"], ["bare"]]


@pytest.mark.parametrize("targets", TARGETS, ids="-".join)
@pytest.mark.parametrize("stored", [True, False], ids=["folder", "live"])
@pytest.mark.parametrize(
    "extra", [{}, {"use_rslora": True, "alpha_pattern": {"c_proj": 5}, "rank_pattern": {"wide": 3}}]
)
def test_each_layer_keeps_its_own_orientation(tmp_path, targets, stored, extra):
    base = mixed()
    model = adapted(base, target_modules=targets, **extra)
    model.save_pretrained(tmp_path)
    is_peft_merge(base, tmp_path if stored else model, model)


@pytest.mark.parametrize("targets", [["c_proj"], ["square"], ["c_attn", "wide"], ["bare", "wide"]], ids="-".join)
def test_shapes_and_biases_tell_it_where_the_base_is_a_state_dict(tmp_path, targets):
    base = mixed()
    model = adapted(base, target_modules=targets)
    model.save_pretrained(tmp_path)
    is_peft_merge(base.state_dict(), tmp_path, model)


def test_a_square_weight_that_may_be_either_is_refused(tmp_path):
    base = mixed()
    model = adapted(base, target_modules=["c_proj", "square"])
    model.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"finetuned: expected a base whose layers are known, got the square weight '.*pass the base as",
    ):
        TaskVector(base.state_dict(), tmp_path)
    is_peft_merge(base.state_dict(), model, model)  # a live model's layers say it


@pytest.fixture
def gpt2(tmp_path):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=8, tie_word_embeddings=False, bos_token_id=0
    )
    base = transformers.GPT2LMHeadModel(config)
    base.save_pretrained(tmp_path / "base")
    return base


def test_a_base_on_disk_is_asked_through_its_configuration(gpt2, tmp_path):
    model = adapted(gpt2, target_modules=["c_proj", "lm_head"], fan_in_fan_out=False)
    model.save_pretrained(tmp_path / "adapter")
    assert not json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["fan_in_fan_out"]
    expected = copy.deepcopy(model).merge_and_unload().state_dict()
    merged = TaskVector(tmp_path / "base", tmp_path / "adapter").apply_to(tmp_path / "base")
    for key, value in merged.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6)
    (tmp_path / "base" / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"fan_in_fan_out .*can't build|fan_in_fan_out .*names no architecture"):
        TaskVector(tmp_path / "base", tmp_path / "adapter")


# ------------------------------------------------------------------------------------------------ ties


TIED = {
    "the head alone": {"target_modules": ["body"], "modules_to_save": ["head"]},
    "the embedding alone": {"target_modules": ["body", "embed"]},
    "LoRA on the head": {"target_modules": ["head"]},
}


@pytest.mark.parametrize("case", TIED)
@pytest.mark.parametrize("stored", [True, False], ids=["folder", "live"])
def test_one_of_two_tied_weights_is_refused(tmp_path, case, stored):
    base = tied()
    model = adapted(base, **TIED[case])
    model.save_pretrained(tmp_path)
    for plain in (base, base.state_dict()):
        with pytest.raises(ValueError, match=r"changes '.*' alone, which is tied to .*untie the two in the base"):
            TaskVector(plain, tmp_path if stored else model)


def test_a_tied_weight_that_is_excluded_is_no_hindrance():
    model = adapted(tied(), **TIED["the embedding alone"])
    assert list(TaskVector(tied(), model, exclude=["embed.*"]).blocks) == ["body.weight"]


@pytest.mark.parametrize("case", TIED)
def test_an_untied_base_takes_it_and_computes_what_the_model_did(case):
    base = tied()
    model = adapted(base, **TIED[case]).eval()
    tokens = torch.arange(7)
    untied = copy.deepcopy(base)
    untied.head.weight = nn.Parameter(untied.head.weight.detach().clone())
    merged = TaskVector(untied, model).apply_to(untied)
    torch.testing.assert_close(merged(tokens), model(tokens), rtol=1e-4, atol=1e-5)


def test_a_tie_that_only_the_configuration_knows(tmp_path):
    """safetensors keep a tied weight once: the file does not say that there are two."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=8, bos_token_id=0)
    base = transformers.GPT2LMHeadModel(config)
    base.save_pretrained(tmp_path / "base")
    model = adapted(base, target_modules=["wte"])
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    for adapter in (model, tmp_path / "adapter"):
        with pytest.raises(ValueError, match=r"changes 'transformer\.wte\.weight' alone, which is tied to 'lm_head"):
            TaskVector(tmp_path / "base", adapter)


# ------------------------------------------------------------------------------------------------ live state


def test_a_scaled_layer_is_scaled():
    base = mixed()
    model = adapted(base, target_modules=["square", "c_proj", "embed"])
    model.base_model.model.square.scale_layer(0.5)
    model.base_model.model.embed.set_scale("default", 3.0)  # scale_layer passes over embeddings
    is_peft_merge(base, model, model)
    plain = TaskVector(base, adapted(base, target_modules=["square", "c_proj", "embed"]))
    scaled = TaskVector(base, model)
    for block, factor in {"square.weight": 0.5, "embed.weight": 3.0, "c_proj.weight": 1.0}.items():
        torch.testing.assert_close(scaled.blocks[block], factor * plain.blocks[block])


@pytest.mark.parametrize("bias", ["lora_only", "all"])
@pytest.mark.parametrize("stored", [True, False], ids=["folder", "live"])
def test_trained_biases(tmp_path, bias, stored):
    base = mixed()
    model = adapted(base, target_modules=["square", "c_proj"], bias=bias)
    model.save_pretrained(tmp_path)
    is_peft_merge(base, tmp_path if stored else model, model)


def test_an_inactive_second_adapter_changes_nothing():
    base = mixed()
    model = adapted(base, target_modules=["square"])
    alone = TaskVector(base, model).blocks["square.weight"]
    model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["wide", "square"]))
    model.set_adapter("other")
    moved(model, 2)
    model.set_adapter("default")
    is_peft_merge(base, model, model)
    blocks = TaskVector(base, model).blocks
    assert list(blocks) == ["square.weight"]
    assert torch.equal(blocks["square.weight"], alone)


def several(model):
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["wide"]))
    model.base_model.set_adapter(["default", "other"])


def elsewhere(model):
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["square"]))
    model.base_model.model.square.set_adapter("other")


def unfrozen(model):
    model.base_model.model.norm.weight.requires_grad_(True)


STATES = {
    "merged": (lambda model: model.merge_adapter(), "expected adapters beside the base's weights.*unmerge_adapter"),
    "disabled": (lambda model: model.base_model.disable_adapter_layers(), "expected an enabled adapter"),
    "several active": (several, "expected one active adapter, got .*default.*other"),
    "another one at one layer": (
        elsewhere,
        r"the active adapter 'default' at every layer, got \['other'\] at 'square'",
    ),
    "trained beside it": (unfrozen, r"got 'norm\.weight' outside of it"),
}


@pytest.mark.parametrize("case", STATES)
def test_live_states_that_no_vector_stands_for_are_refused(case):
    base = mixed()
    model = adapted(base, target_modules=["square", "c_proj"])
    change, message = STATES[case]
    change(model)
    with pytest.raises(ValueError, match=f"^finetuned: .*{message}"):
        TaskVector(base, model)


KINDS = {
    "DoRA": ({"target_modules": ["square"], "use_dora": True}, "use_dora"),
    "tokens": ({"target_modules": ["square"], "trainable_token_indices": {"embed": [1]}}, "trainable_token_indices"),
    "parameters": ({"target_modules": [], "target_parameters": ["square.weight"]}, "target_parameters"),
    "bias of a factor": (
        {"target_modules": ["square"], "lora_bias": True},
        "expected tensors of a plain LoRA, got .*lora_B.bias'",
    ),
    "attention": ({"target_modules": ["attention"]}, "MultiheadAttention"),
    "statistics": (
        {"target_modules": ["square"], "modules_to_save": ["norm"]},
        "changes the buffer 'norm.running_mean'",
    ),
}


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize("stored", [True, False], ids=["folder", "live"])
def test_kinds_of_adapters_that_are_no_plain_product_are_refused(tmp_path, case, stored):
    base = mixed()
    settings, message = KINDS[case]
    model = adapted(base, **settings)
    if case == "statistics":
        model.base_model.model.norm.modules_to_save["default"].running_mean += 1
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"finetuned: .*{message}.*merge_and_unload"):
        TaskVector(base, tmp_path if stored else model)


def test_replicated_layers_are_refused(tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=20
    )
    base = transformers.LlamaForCausalLM(config)
    model = adapted(base, target_modules=["q_proj"], layer_replication=[(0, 2), (0, 2)])
    model.save_pretrained(tmp_path)
    for adapter in (model, tmp_path):
        with pytest.raises(ValueError, match=r"got one with layer_replication.*merge_and_unload"):
            TaskVector(base, adapter)


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)

    def forward(self, weight):
        return self.mix(weight)


@pytest.mark.parametrize("stored", [True, False], ids=["folder", "live"])
def test_layers_under_a_parametrization(tmp_path, stored):
    """The parametrized weight itself is no stored weight; a layer inside the parametrization is one like any other."""
    base = mixed()
    parametrize.register_parametrization(base.square, "weight", Doubled())
    inner = adapted(base, target_modules=["mix"])
    inner.save_pretrained(tmp_path / "inner")
    is_peft_merge(base, tmp_path / "inner" if stored else inner, inner)
    outer = adapted(base, target_modules=["square"])
    outer.save_pretrained(tmp_path / "outer")
    with pytest.raises(ValueError, match=r"'square\.weight'.*parametrized"):
        TaskVector(base, tmp_path / "outer" if stored else outer)


# ------------------------------------------------------------------------------------------------ in place


def test_a_base_that_peft_changed_in_place_is_explained():
    base = mixed()
    model = moved(peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["square"])))
    plain = TaskVector(mixed(), model)
    says = r"{}: expected a model without adapters.*get_peft_model works in place.*copy\.deepcopy\(model\)"
    for wrong in (base, base.state_dict(), model):
        with pytest.raises(ValueError, match=says.format("base")):
            TaskVector(wrong, model)
        with pytest.raises(ValueError, match=says.format("base")):
            TaskVector(wrong, mixed())
        with pytest.raises(ValueError, match=says.format("base")):
            plain.apply_to(wrong)
        with pytest.raises(ValueError, match=says.format("base")):
            task_arithmetic(wrong, [plain])
    for wrong in (base, base.state_dict()):
        with pytest.raises(ValueError, match=says.format("finetuned")):
            TaskVector(mixed(), wrong)
    with pytest.raises(ValueError, match=says.format("model")):
        AnisotropicScaling(base, [plain])


def test_a_model_whose_own_layer_is_called_base_layer_is_plain():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.ModuleDict({"base_layer": nn.Linear(3, 3), "adapter": nn.Linear(3, 3)})

    one, two = Own(), Own()
    for base, tuned in ((one, two), (one.state_dict(), two.state_dict())):
        assert len(TaskVector(base, tuned)) == 4

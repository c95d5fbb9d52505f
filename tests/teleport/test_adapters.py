"""PEFT adapters go in and come out without a trace, and move what they say."""

import pytest
import torch
from torch import nn

import cost_mtl
from cost_mtl import Acceptance, LoRATeleporter
from cost_mtl._torch.rng import ForwardState
from cost_mtl.distributed.failures import FailTogether
from cost_mtl.gradients.gramian import gramian
from cost_mtl.gradients.layout import Layout
from cost_mtl.teleport.coordinates.adapters import adapters
from cost_mtl.teleport.coordinates.layers import shared_layers
from cost_mtl.teleport.problem import Problem
from tests.nets import MultiHead, convnet, data, losses, mlp

LOOSE = Acceptance(tolerance=0.5, tolerance_heldout=0.5, min_angle=-1.0, min_norm=-1.0)
NAMES = ("0", "1", "2")


def problem_of(model, x, ys):
    layout = Layout([p for p in model.trunk.parameters() if p.requires_grad])
    G = cost_mtl.task_gradients(losses(model, x, ys), layout.params)
    return Problem(
        model, layout, list(model.heads.parameters()), [[lambda: losses(model, x, ys)]],
        ForwardState.capture(model.modules(), []), NAMES[: len(model.heads)],
        torch.stack(losses(model, x, ys)).detach().double(), G,
        gramian(G, dtype=torch.float64), None, torch.Generator().manual_seed(0), FailTogether(layout.device, None),
    )  # fmt: skip


@pytest.mark.parametrize("build", [lambda: (mlp(2), data(2)), lambda: (convnet(dropout=0.0), data(2, shape=(2, 8, 8)))])
@pytest.mark.parametrize("batch", [0, 1])
def test_lora_gradients_from_the_weights_gradients_are_those_of_autograd(build, batch):
    from peft import LoraConfig

    model, (x, ys) = build()
    problem = problem_of(model, x, ys)
    problem.closures.append([lambda: losses(model, x.flip(0) * 1.5, ys)])
    if batch:
        problem.gramian_at_theta(batch)
    layers, _ = shared_layers([model], problem.params)
    with adapters(problem, layers, LoraConfig(r=3, lora_alpha=7), plain_lora=True) as coordinates:
        before = problem.calls
        quick_losses, quick = coordinates.gradients(batch)
        assert problem.calls == before
        coordinates.plain_lora = False
        slow_losses, slow = coordinates.gradients(batch)
    assert torch.equal(quick_losses, slow_losses)
    assert slow.abs().max() > 0
    torch.testing.assert_close(quick, slow, rtol=1e-4, atol=1e-6)


CONFIGS = {
    "LoRA": ("LoraConfig", {"r": 4}),
    "rsLoRA": ("LoraConfig", {"r": 4, "use_rslora": True}),
    "DoRA": ("LoraConfig", {"r": 4, "use_dora": True}),
    "LoHa": ("LoHaConfig", {"r": 4}),
    "LoKr": ("LoKrConfig", {"r": 4}),
    "OFT": ("OFTConfig", {"r": 0, "oft_block_size": 4}),
    "BOFT": ("BOFTConfig", {"boft_block_size": 4}),
    "HRA": ("HRAConfig", {"r": 4}),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_any_peft_method_moves_without_a_trace_or_is_refused_by_name(name, kind):
    import peft

    torch.manual_seed(0)
    model = mlp(2, width=8) if kind == "linear" else convnet(dropout=0.0)
    x, ys = data(2) if kind == "linear" else data(2, shape=(2, 8, 8))
    if kind == "linear":  # sizes that every method's blocks divide
        model.trunk[0] = nn.Linear(6, 8)
        x = x[:, :6]
    cls, kwargs = CONFIGS[name]
    config = getattr(peft, cls)(**kwargs)
    opt = cost_mtl.COST(torch.optim.Adam(model.parameters()), model, shared=model.trunk,
                        teleporter=LoRATeleporter(peft_config=config, acceptance=LOOSE))  # fmt: skip
    keys, modules = list(model.state_dict()), [(n, id(m)) for n, m in model.named_modules()]
    before = torch.stack(losses(model, x, ys)).detach()
    buffers = [b.clone() for b in model.buffers()]
    refused, report = "", None
    try:
        report = opt.teleport(lambda: losses(model, x, ys))
    except cost_mtl.NoAdaptableLayerError as error:
        refused = str(error)
    finally:
        assert list(model.state_dict()) == keys
        assert [(n, id(m)) for n, m in model.named_modules()] == modules
        assert all(p.requires_grad for p in model.parameters())
        assert not hasattr(model, "peft_config")
    if report is None:
        assert "trunk.0" in refused
        return
    for b, saved in zip(model.buffers(), buffers, strict=True):
        b.copy_(saved)
    after = torch.stack(losses(model, x, ys)).detach()
    if report.accepted:
        torch.testing.assert_close(report.losses_after.float(), after, rtol=1e-4, atol=1e-6)
    else:
        torch.testing.assert_close(before, after, rtol=0, atol=0)


def test_oft_on_convolutions_is_left_out_layer_by_layer():
    from peft import OFTConfig

    model = convnet(dropout=0.0)
    x, ys = data(2, shape=(2, 8, 8))
    opt = cost_mtl.COST(torch.optim.Adam(model.parameters()), model, shared=model.trunk,
                        teleporter=LoRATeleporter(peft_config=OFTConfig(r=0, oft_block_size=2)))  # fmt: skip
    values = [v.clone() for v in model.parameters()]
    with pytest.raises(cost_mtl.NoAdaptableLayerError, match="identity"):
        opt.teleport(lambda: losses(model, x, ys))
    assert all(torch.equal(a, b) for a, b in zip(values, model.parameters(), strict=True))


def test_target_modules_choose():
    from peft import LoraConfig

    model = mlp(2)
    x, ys = data(2)
    config = LoraConfig(r=2, target_modules=["trunk.2"])
    opt = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk,
                        teleporter=LoRATeleporter(peft_config=config, acceptance=LOOSE))  # fmt: skip
    first = model.trunk[0].weight.detach().clone()
    report = opt.teleport(lambda: losses(model, x, ys))
    assert report.accepted, report.reason
    assert torch.equal(first, model.trunk[0].weight)
    assert "target_modules" in report.skipped_layers["trunk.0"]


class Odd(nn.Module):
    """Layers that no adapter fits, next to one that it does."""

    def __init__(self):
        super().__init__()
        self.tied = nn.Linear(6, 6)
        self.twin = nn.Linear(6, 6)
        self.twin.weight = self.tied.weight
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.used_twice = nn.Linear(6, 6)
        self.alias = self.used_twice
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.never = nn.Linear(6, 6)

    def forward(self, x):
        x = self.normed(self.twin(torch.tanh(self.tied(x))))
        x = self.alias(torch.tanh(self.used_twice(x)))
        return self.frozen(x + self.attention(x[:, None], x[:, None], x[:, None])[0][:, 0])


def test_layers_that_do_not_fit_are_named_and_left_alone():
    torch.manual_seed(0)
    model = MultiHead(Odd(), 6, 2)
    x, ys = data(2)
    layers, skipped = shared_layers([model], [p for p in model.trunk.parameters() if p.requires_grad])
    assert {layer.name for layer in layers} == {"trunk.used_twice", "trunk.never"}
    assert "tied" in skipped["trunk.tied"]
    assert "tied" in skipped["trunk.twin"]
    assert "parametrized" in skipped["trunk.normed"]
    assert "MultiheadAttention" in skipped["trunk.attention.out_proj"]
    assert "trunk.frozen" not in skipped
    values = {k: v.clone() for k, v in model.state_dict().items()}
    opt = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk,
                        teleporter=LoRATeleporter(acceptance=LOOSE))  # fmt: skip
    report = opt.teleport(lambda: losses(model, x, ys))
    assert report.accepted, report.reason
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, values[k])}
    assert changed == {"trunk.used_twice.weight", "trunk.alias.weight"}


@pytest.mark.parametrize("kind", ["LoHa", "LoKr", "LoRA with dropout"])
def test_an_adapters_own_dropout_does_not_shift_the_models_masks(kind):
    """LoHa and LoKr draw a random number in every training forward, even at rate 0. Where that shifts the masks of the
    model's dropout no loss is kept, and every move is rejected."""
    import peft

    config = {
        "LoHa": peft.LoHaConfig(r=4, alpha=4),
        "LoKr": peft.LoKrConfig(r=4, alpha=4),
        "LoRA with dropout": peft.LoraConfig(r=4, lora_alpha=4, lora_dropout=0.3),
    }[kind]
    model, (x, ys) = convnet(dropout=0.3), data(2, shape=(2, 8, 8))
    modes = [m.training for m in model.modules()]
    problem = problem_of(model, x, ys)
    layers, _ = shared_layers([model], problem.params)
    plain = problem.evaluate(0)
    with adapters(problem, layers, config) as coordinates:
        torch.testing.assert_close(problem.evaluate(0), plain, rtol=1e-5, atol=0)
        coordinates.place(torch.full_like(coordinates.origin, 1e-6))
        torch.testing.assert_close(problem.evaluate(0), plain, rtol=1e-3, atol=0)
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(problem.evaluate(0), plain)


def test_what_is_no_adapters_config_is_refused_when_the_teleporter_is_made():
    import peft

    for config in ({"r": 3}, peft.LoraConfig, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), 5):
        with pytest.raises(TypeError, match="peft_config: expected the config of a PEFT method"):
            cost_mtl.LoRATeleporter(peft_config=config)
    with pytest.raises(ValueError, match="rank: expected it in peft_config"):
        cost_mtl.LoRATeleporter(rank=9, peft_config=peft.LoHaConfig(r=4))


def test_gradients_of_a_second_batch_are_let_go_whether_they_are_of_use_or_not():
    import peft

    for config in (peft.LoraConfig(r=3, lora_alpha=3), peft.LoHaConfig(r=3, alpha=3)):
        model, (x, ys) = mlp(2), data(2)
        problem = problem_of(model, x, ys)
        problem.closures.append([lambda: losses(model, x * 2, ys)])  # noqa: B023
        problem.gramian_at_theta(1)
        with adapters(problem, shared_layers([model], problem.params)[0], config) as coordinates:
            coordinates.gradients(1)
        assert problem.known_gradients(1) is None

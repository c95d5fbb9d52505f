"""Layers of every kind: moved without drift, or left out by name."""

import pytest
import torch
from torch import nn

import cost_mtl
from cost_mtl import Acceptance, DenseTeleporter, LevelSet, LoRATeleporter, Penalty
from tests.nets import MultiHead, losses

LOOSE = Acceptance(min_angle=-1.0, min_norm=-1.0)


def teleport(trunk, x, width, teleporter):
    """(model, values before, report); a drift of more than 1 % as an outsider measures it is a failure."""
    model = MultiHead(trunk, width, 2)
    g = torch.Generator().manual_seed(4)
    ys = [0.3 * torch.randn(len(x), 1, generator=g), 2 * torch.randn(len(x), 1, generator=g) + 1]
    opt = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk, teleporter=teleporter)
    values = {k: v.clone() for k, v in model.state_dict().items()}
    before = torch.stack(losses(model, x, ys)).detach()
    report = opt.teleport(lambda: losses(model, x, ys))
    change = (torch.stack(losses(model, x, ys)).detach() - before).abs() / before
    assert float(change.max()) <= (0.0101 if report.accepted else 0.0)
    return model, values, report


def moved(model, values):
    return {k for k, v in model.state_dict().items() if not torch.equal(v, values[k])}


def test_oft_keeps_the_layers_it_fits_and_leaves_wide_kernels_out():
    """PEFT's OFT is not the identity on convolutions wider than 1: those are refused one by one, the others move."""
    from peft import OFTConfig

    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 8, 1), nn.Tanh(), nn.Flatten(),
                          nn.Linear(8 * 25, 8), nn.Tanh())  # fmt: skip
    config = OFTConfig(r=0, oft_block_size=2)
    model, values, report = teleport(trunk, torch.randn(32, 2, 5, 5), 8, LoRATeleporter(peft_config=config, acceptance=LOOSE))  # noqa: E501  # fmt: skip
    assert report.accepted, report.reason
    assert moved(model, values) == {"trunk.2.weight", "trunk.5.weight"}
    assert "not the identity" in report.skipped_layers["trunk.0"]
    assert set(report.skipped_layers) == {"trunk.0"}


def test_grouped_convolutions_are_left_out():
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Conv2d(2, 8, 1), nn.Tanh(), nn.Conv2d(8, 8, 3, groups=8), nn.Tanh(),
                          nn.Conv2d(8, 8, 1, groups=2), nn.Flatten(), nn.Linear(8 * 9, 8), nn.Tanh())  # fmt: skip
    model, values, report = teleport(trunk, torch.randn(32, 2, 5, 5), 8, LoRATeleporter(acceptance=LOOSE))
    assert report.accepted, report.reason
    assert moved(model, values) == {"trunk.0.weight", "trunk.6.weight"}
    assert "groups=8" in report.skipped_layers["trunk.2"]
    assert "groups=2" in report.skipped_layers["trunk.4"]


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.mix = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.mix(self.embedding(x).mean(dim=1)))


@pytest.mark.parametrize(
    ("objective", "solver"), [("auto", LevelSet()), ("norm-exact", LevelSet()), ("norm", Penalty(lr=2e-4, steps=3))]
)
def test_the_padding_row_of_an_embedding_is_not_touched(objective, solver):
    torch.manual_seed(0)
    x = torch.randint(1, 20, (32, 5))
    x[:, 3:] = 0
    model, values, report = teleport(Words(), x, 8, DenseTeleporter(objective, solver, LOOSE))
    assert report.accepted, report.reason
    assert "trunk.embedding.weight" in moved(model, values)
    assert torch.equal(model.trunk.embedding.weight[0], torch.zeros(8))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn, self.out = kind(4, 8, batch_first=True, num_layers=2), nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.out(self.rnn(x)[0][:, -1]))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_have_no_adapter_and_move_densely(kind):
    torch.manual_seed(0)
    x = torch.randn(32, 5, 4)
    model, values, report = teleport(Recurrent(kind), x, 8, LoRATeleporter(acceptance=LOOSE))
    assert report.accepted, report.reason
    assert moved(model, values) == {"trunk.out.weight"}
    assert kind.__name__ in report.skipped_layers["trunk.rnn"]
    model, values, report = teleport(Recurrent(kind), x, 8, DenseTeleporter(acceptance=LOOSE))
    assert report.accepted, report.reason
    assert {"trunk.rnn.weight_hh_l1", "trunk.rnn.weight_ih_l0"} <= moved(model, values)


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.attention = nn.Linear(4, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.first = self.again = nn.Linear(8, 8)

    def forward(self, x):
        x = self.into(x)
        x = self.attention(x, x, x, need_weights=False)[0].mean(dim=1)
        return torch.tanh(self.again(torch.tanh(self.first(x))))


def test_attention_is_left_out_and_a_layer_of_two_names_moves_once():
    torch.manual_seed(0)
    model, values, report = teleport(Attentive(), torch.randn(32, 5, 4), 8, LoRATeleporter(acceptance=LOOSE))
    assert report.accepted, report.reason
    assert moved(model, values) == {"trunk.into.weight", "trunk.first.weight", "trunk.again.weight"}
    assert "MultiheadAttention" in report.skipped_layers["trunk.attention.out_proj"]
    assert model.trunk.first is model.trunk.again

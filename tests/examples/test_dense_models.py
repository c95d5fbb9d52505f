"""SegNet and SegNet-MTAN: the published parameter counts and what the architecture promises."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # scripts that users copy, not an installed package

from dense.models import SegNet, SegNetMTAN, head_channels
from dense.spec import CITYSCAPES, NYUV2, DenseSpec, cityscapes_spec

import cost_mtl

SMALL = (4, 4, 8, 8, 8)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("model", "spec", "expected"),
    [
        (SegNet, NYUV2, 25_055_185),
        (SegNet, CITYSCAPES, 25_017_672),
        (SegNetMTAN, NYUV2, 44_229_073),
        (SegNetMTAN, CITYSCAPES, 41_206_984),
    ],
)
def test_parameter_counts_are_the_published_ones(model: type, spec: DenseSpec, expected: int) -> None:
    with torch.device("meta"):
        assert count(model(head_channels(spec, spec.tasks))) == expected


def test_per_task_attention_is_nine_million_for_three_tasks_and_six_for_two() -> None:
    with torch.device("meta"):
        three = SegNetMTAN(head_channels(NYUV2, NYUV2.tasks))
        two = SegNetMTAN(head_channels(CITYSCAPES, CITYSCAPES.tasks))
    assert count(three.attention) / 1e6 == pytest.approx(9.0, abs=0.05)
    assert count(two.attention) / 1e6 == pytest.approx(6.0, abs=0.05)


@pytest.mark.parametrize("model", [SegNet, SegNetMTAN])
def test_outputs_have_the_image_size_and_are_normalised(model: type) -> None:
    torch.manual_seed(0)
    net = model(head_channels(NYUV2, NYUV2.tasks), SMALL)
    output = net(torch.rand(2, 3, 64, 96))
    assert {task: tuple(value.shape) for task, value in output.items()} == {
        "segmentation": (2, 13, 64, 96),
        "depth": (2, 1, 64, 96),
        "normal": (2, 3, 64, 96),
    }
    torch.testing.assert_close(output["segmentation"].exp().sum(1), torch.ones(2, 64, 96))
    torch.testing.assert_close(output["normal"].norm(dim=1), torch.ones(2, 64, 96))


@pytest.mark.parametrize("model", [SegNet, SegNetMTAN])
def test_each_task_reaches_the_trunk_and_no_other_tasks_parameters(model: type) -> None:
    torch.manual_seed(0)
    net = model(head_channels(NYUV2, NYUV2.tasks), SMALL)
    for task in NYUV2.tasks:
        net.zero_grad(set_to_none=True)
        net(torch.rand(2, 3, 32, 32))[task].square().sum().backward()
        reached = {name for name, p in net.named_parameters() if p.grad is not None}
        own = {name for name, _ in net.named_parameters() if f".{task}." in name}
        others = {name for name, _ in net.named_parameters() for t in NYUV2.tasks if t != task and f".{t}." in name}
        assert own <= reached
        assert not others & reached
        assert {name for name, _ in net.named_parameters()} - own - others <= reached


@pytest.mark.parametrize("model", [SegNet, SegNetMTAN])
def test_cost_finds_what_is_shared_and_leaves_attention_and_heads_to_their_tasks(model: type) -> None:
    """Nash-MTL's scripts and their descendants count the attention in. Only shared gradients are clipped."""
    torch.manual_seed(0)
    net = model(head_channels(NYUV2, NYUV2.tasks), SMALL)
    optimizer = cost_mtl.COST(torch.optim.SGD(net.parameters(), lr=0.0), net, teleporter=None, max_norm=1e-12)
    optimizer.step(lambda: {task: value[:, 0].mean() for task, value in net(torch.rand(2, 3, 32, 32)).items()})
    # weights alone: a bias in front of a batch norm has no gradient
    tiny = {name for name, p in net.named_parameters() if p.dim() > 1 and p.grad.norm() < 1e-11}
    own = {name for name, p in net.named_parameters() if any(f".{task}." in name for task in NYUV2.tasks)}
    assert tiny == {name for name, p in net.named_parameters() if p.dim() > 1} - own


def test_the_two_models_share_one_trunk_architecture() -> None:
    channels = head_channels(CITYSCAPES, CITYSCAPES.tasks)
    with torch.device("meta"):
        assert count(SegNet(channels).trunk) == count(SegNetMTAN(channels).trunk)


def test_the_number_of_classes_only_changes_the_segmentation_head() -> None:
    with torch.device("meta"):
        seven, nineteen = (SegNet(head_channels(cityscapes_spec(n), CITYSCAPES.tasks)) for n in (7, 19))
    assert count(nineteen) - count(seven) == 12 * 65


def test_initialisation_is_xavier_normal_with_zero_biases() -> None:
    torch.manual_seed(0)
    net = SegNet(head_channels(NYUV2, NYUV2.tasks), (64, 64, 64, 64, 64))
    weight = net.trunk.encoder_body[2][0][0].weight
    assert weight.std().item() == pytest.approx((2 / (2 * 64 * 9)) ** 0.5, rel=0.02)
    assert all(not layer.bias.any() for layer in net.modules() if isinstance(layer, nn.Conv2d))


@pytest.mark.parametrize("model", [SegNet, SegNetMTAN])
def test_a_wrong_number_of_stages_is_named(model: type) -> None:
    with pytest.raises(ValueError, match="filters"):
        model({"depth": 1}, (8, 8, 8))

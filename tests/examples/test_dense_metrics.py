"""Losses and metrics of the dense benchmarks against plain NumPy, pixel by pixel, and against torchmetrics."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # scripts that users copy, not an installed package

from dense.losses import dense_losses, depth_loss, normal_loss, segmentation_loss
from dense.metrics import ConfusionMatrix, DenseMeter, DepthErrors, NormalErrors

CLASSES = 5


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=1, keepdim=True)


def batches(sizes: tuple[int, ...], *, absent: int | None = None, seed: int = 0) -> list[tuple[dict, dict]]:
    """(output, target) pairs with invalid pixels in every task; ``absent`` never occurs in truth or prediction."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for size in sizes:
        shape = (size, 6, 7)
        scores = torch.randn(size, CLASSES, 6, 7, generator=generator)
        labels = torch.randint(-1, CLASSES, shape, generator=generator)
        if absent is not None:
            scores[:, absent] = -100
            labels[labels == absent] = -1
        depth = torch.rand(size, 1, 6, 7, generator=generator) + 0.1
        depth[torch.rand(depth.shape, generator=generator) < 0.3] = 0
        normal = unit(torch.randn(size, 3, 6, 7, generator=generator))
        normal[:, :, :2, :3] = 0
        output = {
            "segmentation": scores.log_softmax(1),
            "depth": torch.rand(size, 1, 6, 7, generator=generator),
            "normal": unit(torch.randn(size, 3, 6, 7, generator=generator)),
        }
        result.append((output, {"segmentation": labels, "depth": depth, "normal": normal}))
    return result


def reference(data: list[tuple[dict, dict]], classes: int = CLASSES) -> dict[str, float]:
    """Every metric over the pooled pixels, in float64 with Python's own loops."""
    pairs, absolute, relative, angles = [], [], [], []
    for output, target in data:
        predicted = output["segmentation"].argmax(1)
        for truth, guess in zip(target["segmentation"].flatten().tolist(), predicted.flatten().tolist(), strict=True):
            if truth >= 0:
                pairs.append((truth, guess))
        for truth, guess in zip(target["depth"].flatten().tolist(), output["depth"].flatten().tolist(), strict=True):
            if truth != 0:
                absolute.append(abs(truth - guess))
                relative.append(abs(truth - guess) / truth)
        t = target["normal"].double().permute(0, 2, 3, 1).reshape(-1, 3).numpy()
        p = output["normal"].double().permute(0, 2, 3, 1).reshape(-1, 3).numpy()
        for a, b in zip(t, p, strict=True):
            if a.any():
                angles.append(math.degrees(math.acos(max(-1.0, min(1.0, float(a @ b))))))
    ious = []
    for c in range(classes):
        intersection = sum(t == c and g == c for t, g in pairs)
        union = sum(t == c or g == c for t, g in pairs)
        if union:
            ious.append(intersection / union)
    shares = {f"within_{d:g}": 100 * float(np.mean(np.array(angles) < d)) for d in (11.25, 22.5, 30.0)}
    return {
        "mIoU": 100 * float(np.mean(ious)),
        "pix_acc": 100 * float(np.mean([t == g for t, g in pairs])),
        "abs_err": float(np.mean(absolute)),
        "rel_err": float(np.mean(relative)),
        "normal_mean": float(np.mean(angles)),
        "normal_median": float(np.median(angles)),
        **shares,
    }


def measured(data: list[tuple[dict, dict]], *, faithful: bool = False) -> dict[str, float]:
    meter = DenseMeter(("segmentation", "depth", "normal"), CLASSES, faithful=faithful)
    for output, target in data:
        meter.update(output, target)
    return meter.compute()


@pytest.mark.parametrize("absent", [None, 3])
@pytest.mark.parametrize("sizes", [(3,), (4, 4, 1), (2, 5)])
def test_metrics_equal_numpy_pixel_by_pixel(sizes: tuple[int, ...], absent: int | None) -> None:
    data = batches(sizes, absent=absent)
    expected = reference(data)
    assert measured(data) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_the_metrics_do_not_depend_on_how_the_pixels_are_batched() -> None:
    data = batches((4, 4, 2))
    one = ({k: torch.cat([o[k] for o, _ in data]) for k in data[0][0]},
           {k: torch.cat([t[k] for _, t in data]) for k in data[0][1]})  # fmt: skip
    assert measured(data) == pytest.approx(measured([one]), rel=1e-6)


def test_faithful_metrics_are_means_of_batch_means() -> None:
    data = batches((4, 4, 1))
    separate = [reference([pair]) for pair in data]
    result = measured(data, faithful=True)
    names = ("abs_err", "rel_err", "normal_mean", "normal_median", "within_11.25", "within_22.5", "within_30")
    for name in names:
        assert result[name] == pytest.approx(np.mean([row[name] for row in separate]), rel=1e-5, abs=1e-6)
    pooled = measured(data)
    assert all(result[name] != pytest.approx(pooled[name], rel=1e-6) for name in ("abs_err", "normal_median"))


def test_a_class_that_is_absent_is_left_out_and_makes_the_faithful_miou_nan() -> None:
    data = batches((2, 2), absent=3)
    assert math.isfinite(measured(data)["mIoU"])
    assert math.isnan(measured(data, faithful=True)["mIoU"])


def test_a_class_that_is_only_predicted_counts_as_zero() -> None:
    matrix = ConfusionMatrix(3)
    scores = torch.zeros(1, 3, 1, 2)
    scores[0, 2, 0, 0] = 1  # truth 0, predicted 2
    scores[0, 1, 0, 1] = 1  # truth 1, predicted 1
    matrix.update(scores, torch.tensor([[[0, 1]]]))
    assert matrix.compute()["mIoU"] == pytest.approx(100 * (0 + 1 + 0) / 3)


def test_miou_and_accuracy_equal_torchmetrics() -> None:
    from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

    data = batches((3, 2, 1), absent=1, seed=5)
    iou = MulticlassJaccardIndex(CLASSES, ignore_index=-1)
    accuracy = MulticlassAccuracy(CLASSES, average="micro", ignore_index=-1)
    matrix = ConfusionMatrix(CLASSES)
    for output, target in data:
        for meter in (iou, accuracy, matrix):
            meter.update(output["segmentation"], target["segmentation"])
    result = matrix.compute()
    assert result["mIoU"] == pytest.approx(100 * iou.compute().item(), rel=1e-5)
    assert result["pix_acc"] == pytest.approx(100 * accuracy.compute().item(), rel=1e-5)


def test_without_a_valid_pixel_every_metric_is_nan_and_nothing_is_raised() -> None:
    output, target = batches((2,))[0]
    target = {name: torch.full_like(value, -1 if name == "segmentation" else 0) for name, value in target.items()}
    assert all(math.isnan(value) for value in measured([(output, target)]).values())
    meter = DenseMeter(("segmentation", "depth", "normal"), CLASSES)
    assert all(math.isnan(value) for value in meter.compute().values())  # not even a batch


def test_an_invalid_batch_does_not_disturb_the_others() -> None:
    data = batches((3, 2))
    output, target = data[0]
    empty = {name: torch.full_like(value, -1 if name == "segmentation" else 0) for name, value in target.items()}
    assert measured([*data, (output, empty)]) == pytest.approx(measured(data), rel=1e-9)


def test_a_meter_lives_for_one_pass() -> None:
    """The public scripts carry one epoch's test pixels over into the next training confusion matrix."""
    first, second = batches((2,), seed=1), batches((2,), seed=2)
    measured(first)
    assert measured(second) == pytest.approx(reference(second), rel=1e-5)


def test_normals_whose_components_sum_to_zero_count_unless_faithful() -> None:
    target = torch.zeros(1, 3, 1, 2)
    target[0, :, 0, 0] = torch.tensor([math.sqrt(0.5), -math.sqrt(0.5), 0.0])
    prediction = torch.zeros(1, 3, 1, 2)
    prediction[0, 2] = 1
    here, scripts = NormalErrors(), NormalErrors(faithful=True)
    here.update(prediction, target)
    scripts.update(prediction, target)
    assert here.compute()["normal_mean"] == pytest.approx(90)
    assert math.isnan(scripts.compute()["normal_mean"])
    assert normal_loss(prediction, target).item() == pytest.approx(1)
    assert normal_loss(prediction, target, faithful=True).item() == 0


def test_the_median_of_an_even_number_of_angles_is_the_mean_of_the_two_middle_ones() -> None:
    angles = torch.deg2rad(torch.tensor([10.0, 20.0, 40.0, 80.0]))
    prediction = torch.stack([angles.cos(), angles.sin(), torch.zeros(4)]).view(1, 3, 1, 4)
    target = torch.zeros(1, 3, 1, 4)
    target[:, 0] = 1
    meter = NormalErrors()
    meter.update(prediction, target)
    assert meter.compute()["normal_median"] == pytest.approx(30, rel=1e-5)


def test_relative_error_divides_by_the_truth() -> None:
    meter = DepthErrors()
    meter.update(torch.tensor([[[[3.0, 1.0, 9.0]]]]), torch.tensor([[[[2.0, 4.0, 0.0]]]]))
    assert meter.compute() == pytest.approx({"abs_err": 2.0, "rel_err": (0.5 + 0.75) / 2})


# ------------------------------------------------------------------------------------------------ losses


def test_losses_equal_numpy() -> None:
    output, target = batches((3,))[0]
    losses = dense_losses(output, target)
    log_probs, labels = output["segmentation"].double().numpy(), target["segmentation"].numpy()
    picked = [-log_probs[b, labels[b, i, j], i, j]
              for b in range(3) for i in range(6) for j in range(7) if labels[b, i, j] >= 0]  # fmt: skip
    depth, truth = output["depth"].double().numpy(), target["depth"].double().numpy()
    t, p = target["normal"].double().numpy(), output["normal"].double().numpy()
    valid = (t != 0).any(1)
    expected = {
        "segmentation": np.mean(picked),
        "depth": np.abs(depth - truth)[truth != 0].mean(),
        "normal": 1 - (t * p).sum(1)[valid].mean(),
    }
    assert list(losses) == ["segmentation", "depth", "normal"]
    for name, value in expected.items():
        assert losses[name].item() == pytest.approx(value, rel=1e-5)


def test_segmentation_loss_is_torchs_cross_entropy() -> None:
    output, target = batches((2,))[0]
    expected = torch.nn.functional.nll_loss(output["segmentation"], target["segmentation"], ignore_index=-1)
    torch.testing.assert_close(segmentation_loss(output["segmentation"], target["segmentation"]), expected)


@pytest.mark.parametrize("task", ["segmentation", "depth", "normal"])
def test_without_a_valid_pixel_a_loss_is_zero_with_a_zero_gradient(task: str) -> None:
    output, target = batches((2,))[0]
    prediction = output[task].clone().requires_grad_()
    empty = torch.full_like(target[task], -1 if task == "segmentation" else 0)
    loss = dense_losses({task: prediction}, {task: empty})[task]
    loss.backward()
    assert loss.item() == 0
    assert prediction.grad is not None
    assert not prediction.grad.any()


def test_an_invalid_pixel_with_an_infinite_prediction_does_not_reach_loss_or_gradient() -> None:
    prediction = torch.tensor([[[[1.0, math.inf]]]], requires_grad=True)
    loss = depth_loss(prediction, torch.tensor([[[[3.0, 0.0]]]]))
    loss.backward()
    assert loss.item() == 2
    assert prediction.grad is not None
    assert prediction.grad.flatten().tolist() == [-1, 0]


def test_an_unknown_task_is_named() -> None:
    with pytest.raises(ValueError, match="edges"):
        dense_losses({"edges": torch.zeros(1)}, {"edges": torch.zeros(1)})

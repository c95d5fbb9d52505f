"""celeba.py: the published network, the official layout, F1, and the script at smoke size."""

from __future__ import annotations

import csv
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # scripts that users copy, not an installed package

import celeba
from celeba import ATTRIBUTES, AttributeNet, CelebA, F1Meter, FaceDataset, read_celeba
from dense.data.faces import FaceSettings, write_faces
from dense.engine.problem import EpochRow
from dense.engine.published import FOLDER, load_celeba
from dense.engine.scores import delta_m
from dense.errors import UserError

SETTINGS = FaceSettings(train=6, val=3, test=2, height=40)


@pytest.fixture(autouse=True)
def _threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_network_has_the_published_parameters() -> None:
    with torch.device("meta"):
        net = AttributeNet(ATTRIBUTES)
    assert sum(p.numel() for p in net.trunk.parameters()) == 5_176_640
    assert [sum(p.numel() for p in head.parameters()) for head in net.heads.values()] == [513] * 40
    kinds = [type(layer).__name__ for layer in net.trunk]
    assert (kinds.count("Conv2d"), kinds.count("Linear"), kinds.count("MaxPool2d")) == (7, 2, 3)


def test_logits_per_attribute() -> None:
    net = AttributeNet(ATTRIBUTES[:3], (4,) * 7)
    output = net(torch.rand(5, 3, 64, 64))
    assert {name: tuple(value.shape) for name, value in output.items()} == dict.fromkeys(ATTRIBUTES[:3], (5,))


def test_the_official_layout_is_read(tmp_path: Path) -> None:
    faces = read_celeba(write_faces(tmp_path / "set", SETTINGS))
    assert {name: len(split.paths) for name, split in faces.items()} == {"train": 6, "val": 3, "test": 2}
    assert faces["val"].paths[0].name == "000007.jpg"
    line = (tmp_path / "set/Anno/list_attr_celeba.txt").read_text().splitlines()[2 + 6].split()
    assert faces["val"].labels[0].tolist() == [float(value == "1") for value in line[1:]]
    sample = FaceDataset(faces["train"], 64)[(0, 2)]
    assert sample["image"].shape == (3, 64, 64)
    assert 0 <= sample["image"].min() < sample["image"].max() <= 1


def test_a_flat_folder_is_read_too(tmp_path: Path) -> None:
    root = write_faces(tmp_path / "set", SETTINGS)
    for path in ("Anno/list_attr_celeba.txt", "Eval/list_eval_partition.txt", "Img/img_align_celeba"):
        (root / path).rename(root / Path(path).name)
    assert len(read_celeba(root)["train"].paths) == 6


def edit(path: Path, change: Callable[[str], str]) -> None:
    path.write_text(change(path.read_text()))


ANNO, EVAL = "Anno/list_attr_celeba.txt", "Eval/list_eval_partition.txt"
BROKEN: list[tuple[Callable[[Path], Any], str]] = [
    (lambda r: r.rename(r.with_name("gone")), "no such folder"),
    (lambda r: (r / ANNO).unlink(), "list_attr_celeba.txt: missing"),
    (lambda r: (r / "Img/img_align_celeba/000004.jpg").unlink(), r"000004\.jpg: missing"),
    (lambda r: edit(r / ANNO, lambda t: t.replace("Male", "Mole")), "expected the 40 attribute names"),
    (lambda r: edit(r / ANNO, lambda t: t.replace("000003.jpg 1", "000003.jpg 2").replace("000003.jpg -1",
                                                                                       "000003.jpg 2")), "line 5"),
    (lambda r: edit(r / EVAL, lambda t: t.replace("000003.jpg 0", "000003.jpg 7")), "line 3"),
    (lambda r: edit(r / EVAL, lambda t: t.replace("000003.jpg 0\n", "")), "10 images, but 11"),
]  # fmt: skip


@pytest.mark.parametrize(("breakage", "message"), BROKEN)
def test_a_damaged_archive_is_named(tmp_path: Path, breakage: Callable[[Path], Any], message: str) -> None:
    root = write_faces(tmp_path / "set", SETTINGS)
    breakage(root)
    with pytest.raises(UserError, match=message):
        read_celeba(root)


def test_a_truncated_image_is_named(tmp_path: Path) -> None:
    root = write_faces(tmp_path / "set", SETTINGS)
    path = root / "Img/img_align_celeba/000001.jpg"
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(UserError, match=r"000001\.jpg: truncated"):
        FaceDataset(read_celeba(root)["train"], 64)[(0, 0)]


def test_f1_equals_scikit_learns_over_pooled_batches() -> None:
    generator = torch.Generator().manual_seed(0)
    tasks = ("Bald", "Male", "Young")
    meter, logits, labels = F1Meter(tasks), [], []
    for size in (7, 5, 2):
        output = {task: torch.randn(size, generator=generator) for task in tasks}
        truth = (torch.rand(size, 40, generator=generator) < 0.4).float()
        truth[:, ATTRIBUTES.index("Bald")] = 0  # nobody is: F1 is 0, not NaN
        meter.update(output, {"labels": truth})
        logits.append(torch.stack([output[task] for task in tasks], 1))
        labels.append(truth[:, [ATTRIBUTES.index(task) for task in tasks]])
    columns = zip(torch.cat(labels).T.numpy(), (torch.cat(logits) > 0).T.numpy(), strict=True)
    expected = [f1_score(truth, guess, zero_division=0) for truth, guess in columns]
    result = meter.compute()
    assert [result[task] for task in tasks] == pytest.approx(expected)
    assert result["f1"] == pytest.approx(np.mean(expected))


def test_losses_are_binary_cross_entropies_of_the_sigmoid() -> None:
    generator = torch.Generator().manual_seed(0)
    output = {"Male": torch.randn(6, generator=generator), "Bald": torch.randn(6, generator=generator)}
    labels = (torch.rand(6, 40, generator=generator) < 0.5).float()
    losses = CelebA({}, 4).losses(output, {"labels": labels})
    for task, logit in output.items():
        p, t = logit.sigmoid().double(), labels[:, ATTRIBUTES.index(task)].double()
        assert losses[task].item() == pytest.approx(-(t * p.log() + (1 - t) * (1 - p).log()).mean().item(), rel=1e-5)


def test_the_epoch_is_chosen_on_validation_and_reported_on_test() -> None:
    def row(epoch: int, val: float, test: float) -> EpochRow:
        return EpochRow(epoch, 1e-3, {}, {"val": {"f1": val}, "test": {"f1": test, "Male": test}})

    history = [row(1, 0.5, 0.9), row(2, 0.7, 0.6), row(3, 0.7, 0.1), row(4, 0.6, 0.95)]
    assert CelebA({}, 4).summary(history, ATTRIBUTES) == {"f1": 0.6, "Male": 0.6}


def test_delta_m_of_the_published_f1_per_attribute() -> None:
    """FairGrad's 40 F1 against the single-task ones: 0.370, the value that the summary file has."""
    table = load_celeba(ATTRIBUTES)
    stl, fairgrad = table.rows[:2]
    assert (stl.method, fairgrad.method) == ("STL", "FairGrad")
    assert delta_m(fairgrad.values[:40], stl.values[:40], [True] * 40) == pytest.approx(0.370, abs=5e-4)
    printed = next(row for row in table.rows if row.method == "FairGrad" and row.delta_m is not None)
    assert printed.delta_m == 0.37


def test_the_two_published_dwa_values_disagree() -> None:
    with (FOLDER / "celeba_qm9_summary.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["dataset"] == "CelebA"]
    values: dict[str, set[float]] = {}
    for row in rows:
        values.setdefault(row["method"], set()).add(float(row["delta_m_pct"]))
    assert {method for method, found in values.items() if len(found) > 1} == {"DWA"}
    assert values["DWA"] == {2.4, 3.2}


def test_smoke_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--data", "synthetic", "--smoke", "--cache", str(tmp_path), "--out", str(tmp_path / "out")]
    assert celeba.main([*argv, "--preset", "ls", "nashmtl", "fairgrad+cost"]) == 0
    text = capsys.readouterr().out
    assert "| FairGrad + COST |" in text
    table = (tmp_path / "out/table.md").read_text()
    assert "mean F1" in table
    assert "2.40" in table  # published rows beside
    rows = list(csv.DictReader((tmp_path / "out/table.csv").read_text().splitlines()))
    assert 0 < float(rows[0]["f1"]) < 1
    assert (tmp_path / "out/metrics.png").read_bytes()[:4] == b"\x89PNG"


def test_a_new_seed_stops_the_loader_of_the_old_one(tmp_path: Path) -> None:
    problem = CelebA(read_celeba(write_faces(tmp_path / "set", SETTINGS)), 3, (4,) * 7, 32)
    first, validation = weakref.ref(problem.train_loader(0, 1)), problem.eval_loader("val")
    assert problem.train_loader(0, 2) is first()
    problem.train_loader(1, 1)
    assert first() is None
    assert problem.eval_loader("val") is validation


def test_a_single_task_network_sees_its_own_attribute(tmp_path: Path) -> None:
    faces = read_celeba(write_faces(tmp_path / "set", SETTINGS))
    problem = CelebA(faces, 3, (4,) * 7, 32)
    model = problem.model(("Male",))
    batch = next(iter(problem.train_loader(0, 1)))
    losses = problem.losses(problem.forward(model, batch), batch)
    assert list(losses) == ["Male"]
    history = [EpochRow(1, 1.0, {}, {"val": {"f1": 0.4}, "test": {"f1": 0.3, "Male": 0.3}})]
    assert problem.summary(history, ("Male",)) == {"Male": 0.3}

"""Lightning, Accelerate and the Hugging Face Trainer: the recipes work, and what does not says what to do instead."""

import os
import socket
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from cost_mtl import COST
from tests.distributed.harness import spawn
from tests.nets import flat

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks' own


@pytest.fixture(autouse=True)
def _examples_and_a_clean_accelerate(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    yield
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
        sys.modules["accelerate.state"].GradientState._reset_state()


def parameters(model):
    return flat(list(model.parameters()))


# ------------------------------------------------------------------------------------ Lightning


def lightning_trainer(epochs, folder, **settings):
    import lightning

    return lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", default_root_dir=folder, logger=False,
        enable_progress_bar=False, enable_model_summary=False, **{"devices": 1} | settings,
    )  # fmt: skip


def lightning_module(cls=None, **settings):
    pytest.importorskip("lightning", reason="of the dev extra")
    import lightning_module as example

    torch.manual_seed(0)
    return (cls or example.Module)(**settings), example.batches()


def test_the_lightning_recipe_counts_steps_teleports_and_resumes(tmp_path):
    module, loader = lightning_module(start=6)
    trainer = lightning_trainer(4, tmp_path / "whole")
    trainer.fit(module, loader)
    optimizer = trainer.optimizers[0]
    assert isinstance(optimizer, COST)
    assert trainer.global_step == optimizer.progress.step == 32
    assert optimizer.progress.attempts >= 1
    assert len(optimizer.progress.memory) == 4
    assert set(trainer.logged_metrics) == {"loss/value", "loss/kind"}

    half, loader = lightning_module(start=6)
    trainer = lightning_trainer(2, tmp_path / "half")
    trainer.fit(half, loader)
    (checkpoint,) = (tmp_path / "half" / "checkpoints").glob("*.ckpt")
    saved = torch.load(checkpoint, weights_only=True)
    assert saved["optimizer_states"][0]["cost"]["step"] == 16
    resumed, loader = lightning_module(start=6)
    nn.init.normal_(resumed.net.trunk[0].weight)
    trainer = lightning_trainer(4, tmp_path / "half")
    trainer.fit(resumed, loader, ckpt_path=checkpoint)
    assert trainer.global_step == 32
    assert torch.equal(parameters(resumed), parameters(module))


def test_lightnings_own_wrapper_takes_a_closure(tmp_path):
    """Without a batch to remember: teleports then verify themselves on the current one alone."""
    import lightning_module as example

    class Wrapped(example.Module):
        def training_step(self, batch, batch_idx):
            losses = self.optimizers().step(lambda: self.task_losses(*batch))
            assert losses.shape == (2,)

    module, loader = lightning_module(Wrapped, start=6)
    plain, _ = lightning_module(start=6)
    trainer = lightning_trainer(1, tmp_path)
    trainer.fit(module, loader)
    assert trainer.global_step == 8
    assert trainer.optimizers[0].progress.memory == []
    assert not torch.equal(parameters(module), parameters(plain))


def test_lightning_with_bfloat16(tmp_path):
    module, loader = lightning_module(start=6)
    trainer = lightning_trainer(1, tmp_path, precision="bf16-mixed")
    trainer.fit(module, loader)
    full, loader = lightning_module(start=6)
    lightning_trainer(1, tmp_path).fit(full, loader)
    start, _ = lightning_module(start=6)
    moved, want = parameters(module) - parameters(start), parameters(full) - parameters(start)
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert 0 < float((moved - want).norm() / want.norm()) < 0.1


def test_lightning_with_two_processes(tmp_path):
    """Lightning puts the whole module into DDP; COST averages over the default group."""
    import lightning_module as example

    class Compared(example.Module):
        def on_train_end(self):
            both = self.all_gather(parameters(self).detach())
            assert both.shape[0] == 2
            assert torch.equal(both[0], both[1])
            assert self.optimizers().progress.attempts >= 1
            assert self.trainer.global_step == 24  # 256 samples, 32 a batch, two processes, six epochs

    module, loader = lightning_module(Compared, start=3)
    start = parameters(module)
    trainer = lightning_trainer(6, tmp_path, strategy="ddp_fork", devices=2)
    trainer.fit(module, loader)
    assert not torch.equal(parameters(module), start)


def test_lightnings_automatic_optimization_is_refused(tmp_path):
    import lightning_module as example

    class Automatic(example.Module):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = True

        def training_step(self, batch, batch_idx):
            return sum(self.task_losses(*batch).values())

    module, loader = lightning_module(Automatic)
    start = parameters(module)
    with pytest.raises(ValueError, match=r"set self\.automatic_optimization = False"):
        lightning_trainer(1, tmp_path).fit(module, loader)
    assert torch.equal(parameters(module), start)


# ------------------------------------------------------------------------------------ Accelerate


def test_the_accelerate_recipe_trains_teleports_and_resumes(tmp_path):
    import accelerate_loop

    model, optimizer = accelerate_loop.train(4, start=6)
    assert optimizer.progress.step == 32
    assert optimizer.progress.attempts >= 1
    accelerate_loop.train(2, start=6, folder=str(tmp_path))
    resumed, again = accelerate_loop.train(2, start=6, folder=str(tmp_path), resume=True)
    assert again.progress.step == 32
    assert torch.equal(parameters(resumed), parameters(model))


def test_accelerate_with_bfloat16():
    import accelerate_loop
    import two_tasks

    model, _ = accelerate_loop.train(1, precision="bf16")
    torch.manual_seed(0)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not torch.equal(parameters(model), parameters(two_tasks.TwoTasks()))


def test_prepared_it_takes_a_closure_and_no_batch():
    import two_tasks
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = two_tasks.TwoTasks()
    start = parameters(model)
    optimizer = COST(torch.optim.Adam(model.parameters()), model, shared=model.trunk)
    model, prepared, loader = accelerator.prepare(model, optimizer, two_tasks.batches())
    batch = next(iter(loader))
    assert prepared.step(lambda: two_tasks.task_losses(model, *batch)) is None  # Accelerate returns nothing
    assert optimizer.last_step.losses.shape == (2,)
    assert not torch.equal(parameters(model), start)
    with pytest.raises(TypeError):
        prepared.step(lambda *batch: two_tasks.task_losses(model, *batch), *batch)


@pytest.mark.parametrize("prepare", [True, False])
def test_accelerates_accumulation_is_refused_with_the_fix(prepare):
    import two_tasks
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = two_tasks.TwoTasks()
    start = parameters(model)
    optimizer = COST(torch.optim.Adam(model.parameters()), model, shared=model.trunk)
    stepped = accelerator.prepare(optimizer) if prepare else optimizer
    batches = list(two_tasks.batches())

    def loop():
        for batch in batches[:2]:
            with accelerator.accumulate(model):
                stepped.step(lambda: two_tasks.task_losses(model, *batch))  # noqa: B023

    with pytest.raises(RuntimeError, match=r"optimizer\.step\(\[closure, closure, \.\.\.\]\)"):
        loop()
    assert torch.equal(parameters(model), start)
    optimizer.step([lambda b=b: two_tasks.task_losses(model, *b) for b in batches[:2]])
    assert not torch.equal(parameters(model), start)


def accelerate_processes(rank, start_group, port, folder):
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    import accelerate_loop

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = accelerate_loop.train(2, start=3)
    return parameters(model), type(optimizer.model).__name__, optimizer.progress.attempts


def test_accelerate_with_two_processes(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    a, b = spawn(2, accelerate_processes, port, str(tmp_path), init=False)
    assert torch.equal(a[0], b[0])
    assert a[1:] == b[1:]
    assert a[1] == "DistributedDataParallel"
    assert a[2] >= 1


# ------------------------------------------------------------------------------------ Hugging Face Trainer


def test_the_hugging_face_trainer_is_told_what_to_do_instead(tmp_path):
    """It calls backward() itself and steps without a closure."""
    transformers = pytest.importorskip("transformers", reason="comes with peft")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x, labels=None):
            return {"loss": (self.layer(x)[:, 0] - labels).square().mean()}

    model = Model()
    start = parameters(model)
    optimizer = COST(torch.optim.AdamW(model.parameters()), model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    settings = transformers.TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to=[])
    data = [{"x": torch.ones(4), "labels": torch.tensor(1.0)}] * 8
    trainer = transformers.Trainer(model, settings, train_dataset=data, optimizers=(optimizer, scheduler))
    with pytest.raises(TypeError, match=r"closure: expected a function .* hand the losses over instead"):
        trainer.train()
    assert torch.equal(parameters(model), start)

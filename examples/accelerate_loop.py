"""COST in an Accelerate loop: ``accelerate launch examples/accelerate_loop.py`` (or plain ``python``).

Accelerate prepares the model and the data; COST stays outside of ``prepare``, because Accelerate's wrapper of an
optimizer hands no batch over and returns no losses. Several processes need nothing more: COST averages the task
gradients over the group of the prepared (DDP) model.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from two_tasks import TwoTasks, batches, task_losses

import cost_mtl


def train(
    epochs: int = 8, start: int = 20, folder: str | None = None, resume: bool = False, precision: str = "no"
) -> tuple[nn.Module, cost_mtl.COST]:
    """Train, and save a checkpoint after every epoch.

    Args:
        epochs: passes over the data.
        start: first step that may teleport.
        folder: where the checkpoint goes; None: nowhere.
        resume: go on from the checkpoint in ``folder``.
        precision: "no" or "bf16". For "fp16" give ``scaler=accelerator.scaler`` to COST.
    """
    accelerator = Accelerator(mixed_precision=precision)
    torch.manual_seed(0)
    model = TwoTasks()
    base = torch.optim.Adam(model.parameters(), lr=1e-3)
    prepared, loader = accelerator.prepare(model, batches())
    optimizer = cost_mtl.COST(
        base,
        prepared,
        shared=model.trunk,
        # Seconds long: it can't wait for a conflict that persists.
        schedule=cost_mtl.TeleportSchedule(start=start, cooldown=10, confirm=False),
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.5)
    accelerator.register_for_checkpointing(optimizer, scheduler)
    if resume:
        accelerator.load_state(folder)

    def closure(*batch: Tensor) -> dict[str, Tensor]:
        return task_losses(prepared, *batch)

    for epoch in range(epochs):
        for batch in loader:
            losses = optimizer.step(closure, *batch)
            scheduler.step()
        named = dict(zip(optimizer.last_step.names, losses.tolist(), strict=True))
        accelerator.print(f"epoch {epoch}: " + ", ".join(f"{name} {loss:.4f}" for name, loss in named.items()))
        if folder is not None:
            accelerator.save_state(folder)
    return model, optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--folder", help="save a checkpoint here after every epoch")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --folder")
    parser.add_argument("--precision", choices=["no", "bf16"], default="no")
    args = parser.parse_args()
    train(args.epochs, folder=args.folder, resume=args.resume, precision=args.precision)


if __name__ == "__main__":
    main()

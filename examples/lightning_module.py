"""COST in PyTorch Lightning, by manual optimization: ``python examples/lightning_module.py``.

Lightning's automatic optimization makes one backward pass of one loss, so a multi-task optimizer has to be stepped by
``training_step`` itself. What changes in a module that you have: the three places marked below.
"""

from __future__ import annotations

import argparse

import lightning
import torch
from torch import Tensor
from two_tasks import TwoTasks, batches, task_losses

import cost_mtl


class Module(lightning.LightningModule):
    """Two tasks on one trunk.

    Args:
        start: first step that may teleport.
        lr: of the base optimizer.
    """

    def __init__(self, start: int = 20, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False  # 1: COST makes the backward passes
        self.net = TwoTasks()

    def task_losses(self, *batch: Tensor) -> dict[str, Tensor]:
        return task_losses(self.net, *batch)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        # Lightning's own wrapper of the optimizer takes a closure, but no batch, on which teleports verify themselves.
        optimizer = self.optimizers(use_pl_optimizer=False)
        count = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        count.increment_ready()
        losses = optimizer.step(self.task_losses, *batch)  # 2: no zero_grad, no backward
        count.increment_completed()  # trainer.global_step, max_steps and checkpoints hang on it
        self.lr_schedulers().step()
        self.log_dict({f"loss/{name}": loss for name, loss in zip(optimizer.last_step.names, losses, strict=True)})

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[torch.optim.lr_scheduler.LRScheduler]]:
        optimizer = cost_mtl.COST(  # 3
            torch.optim.Adam(self.parameters(), lr=self.hparams.lr),
            self,
            shared=self.net.trunk,
            # Seconds long: it can't wait for a conflict that persists.
            schedule=cost_mtl.TeleportSchedule(start=self.hparams.start, cooldown=10, confirm=False),
        )
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.5)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--resume", help="checkpoint to go on from: teleports, weighting and Adam's state included")
    parser.add_argument("--folder", default="lightning_logs")
    args = parser.parse_args()
    trainer = lightning.Trainer(max_epochs=args.epochs, devices=1, default_root_dir=args.folder)
    trainer.fit(Module(), batches(), ckpt_path=args.resume)


if __name__ == "__main__":
    main()

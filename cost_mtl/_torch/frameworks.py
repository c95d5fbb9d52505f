"""Settings of training frameworks that would lose something without a word."""

from __future__ import annotations

import sys


def refuse_accumulation() -> None:
    """Refuse a single closure where Accelerate accumulates gradients: its optimizer wrapper leaves out all steps but
    every n-th, so that COST would see one micro-batch in n.

    Raises:
        RuntimeError: ``Accelerator(gradient_accumulation_steps=n)`` with n > 1.
    """
    state = sys.modules.get("accelerate.state")
    steps = state.GradientState().num_steps if state is not None else 1
    if steps > 1:
        raise RuntimeError(
            f"closure: Accelerate is set to accumulate gradients over {steps} steps, and would let COST see only one "
            "micro-batch of each. Hand them over together, optimizer.step([closure, closure, ...]), and leave "
            "gradient_accumulation_steps at 1"
        )


def advice() -> str:
    """What to do in Lightning, whose automatic optimization hands over a closure that has called backward() already;
    nothing where it is not used."""
    if not any(name in sys.modules for name in ("lightning", "pytorch_lightning")):
        return ""
    return (
        " In Lightning's automatic optimization the closure calls backward() itself: set self.automatic_optimization = "
        "False and call optimizer.step(closure, *batch) in training_step (examples/lightning_module.py shows how)."
    )

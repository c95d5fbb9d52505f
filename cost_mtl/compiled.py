"""Living with ``torch.compile``: one compiled forward pass is followed by K backward passes."""

from __future__ import annotations

import torch
import torch._functorch.config as functorch


def keep_saved_tensors() -> None:
    """Have compiled code keep what it saved for the backward pass, so that it can be run once per task.

    By default it may overwrite ("donate") saved intermediates during the backward pass, and then refuses a second
    one; torch's error names the switch that is set here. What was compiled before is dropped and compiled again at
    its next call: it might donate, and with the switch off nothing would notice. Switch and reset are process-wide,
    done once, by the first COST of a process.
    """
    if functorch.donated_buffer:
        functorch.donated_buffer = False
        torch.compiler.reset()

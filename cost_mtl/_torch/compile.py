"""Living with ``torch.compile``: one compiled forward pass is followed by K backward passes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch._functorch.config as functorch
import torch.compiler.config as compiler
from torch._compile import _disable_dynamo as untraced  # torch.compiler.disable, without its imports

T = TypeVar("T")

TAG = "+saved tensors kept"


def keep_saved_tensors() -> None:
    """Have compiled code keep what it saved for the backward pass, so that it can be run once per task.

    By default it may overwrite ("donate") saved intermediates during the backward pass, and then refuses a second one;
    torch's error names the switch that is set here. The switch alone is not enough: Inductor's cache on disk does not
    look at it, and hands out kernels that overwrite (torch 2.13; wrong gradients, without a word), so the cache gets a
    name of its own. What was compiled before is dropped, and compiled again at its next call.

    All of it is process-wide, and done by the first COST of a process.
    """
    tag = getattr(compiler, "cache_key_tag", None)
    if not functorch.donated_buffer and (tag is None or TAG in tag):
        return
    functorch.donated_buffer = False
    if tag is None:  # a version of torch whose cache can't be given a name
        import torch._inductor.config as inductor

        inductor.fx_graph_cache = False
    elif TAG not in tag:
        compiler.cache_key_tag = tag + TAG
    torch.compiler.reset()


@untraced
def run_untraced(method: Callable[..., T], *args: Any) -> T:
    """Run a method of an optimizer outside of what is being compiled, and inside of its hooks, which have run.

    A step as a whole is no graph: its backward passes run in the middle, and decisions hang on their values. Models,
    closures and base optimizers compiled by themselves stay so.
    """
    with torch.no_grad():
        plain = inspect.unwrap(method, stop=lambda f: getattr(f, "all_or_nothing", None) is f)
        result: T = plain(*args)
    return result

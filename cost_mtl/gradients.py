"""Task gradients, their Gramian and their combination: pure functions on tensors.

All of them can be used in a training loop of one's own::

    G = cost_mtl.task_gradients(losses, model.trunk.parameters())  # [K, m]
    w = cost_mtl.FairGrad(alpha=2.0)(cost_mtl.gramian(G))          # [K]
    d = cost_mtl.combine(G, w)                                     # [m]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from cost_mtl._torch.dtensor import is_sharded, local, pieces_group
from cost_mtl._torch.undo import all_or_nothing, undoing
from cost_mtl.base import Losses
from cost_mtl.losses import TaskLosses, backward, split_losses

CHUNK = 1024
"""Columns per partial product of a Gramian. One float32 product over millions of columns is off by 0.3 to 0.7 % on CPU;
partial products of this width, summed in float64, are good to 3e-7, also for gradients that came out of bf16, whose
roundings add up (at 8192 columns they reach 4e-6)."""

NOISE = {torch.float32: 3e-7, torch.float64: 1e-14}
"""Rounding error of the entries of :func:`gramian`, relative to ||g_i|| ||g_j||, by the dtype of the products."""

EXACT_NOISE = {torch.float32: 1e-12, torch.float64: 1e-14}
"""The same of :func:`exact_gramian`. For gradients in float32 more than its sums leave (1e-15): the gradients have
errors of 1e-7 to 1e-6 themselves, and the square of a sum of them means nothing below the square of that."""

PRODUCTS = 2**18
"""Most entries of partial products alive at a time: 1 MB."""

BLOCK = 8192
"""Columns that pass through the processor's cache at a time where G is read and written in place."""


class Layout:
    """Where each shared parameter lives in the columns of G.

    A parameter's entries are stored in the order of its own memory, so that a gradient handed out as a view of G has
    the parameter's strides (channels_last, transposed weights), which fused optimizer kernels insist on. Of parameters
    that FSDP2 has sharded, a process has the columns of its own pieces.

    Raises:
        TypeError: a parameter is complex.
        ValueError: some parameters are sharded and others are not.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = tuple(params)
        self.index = {id(p): k for k, p in enumerate(self.params)}
        self.pieces = [local(p) for p in self.params]
        self.pieces_group = pieces_group(self.params)
        self._check()
        sizes = [p.numel() for p in self.pieces]
        self.starts = list(accumulate(sizes, initial=0))
        self.numel = sum(sizes)
        self.dense = [_fills_its_memory(p) for p in self.pieces]
        doubles = any(p.dtype == torch.float64 for p in self.params)
        # bf16 and fp16 gradients are kept in float32: their Gramian in 8 or 11 bits would decide nothing reliably.
        self.dtype = torch.float64 if doubles else torch.float32
        self.device = self.params[0].device if self.params else torch.device("cpu")

    def _check(self) -> None:
        odd = next((p for p in self.params if p.is_complex()), None)
        if odd is not None:
            raise TypeError(f"shared: expected real parameters, got a complex one of shape {list(odd.shape)}: keep its "
                            "real and imaginary parts as a real parameter (torch.view_as_real)")  # fmt: skip
        if len({is_sharded(p) for p in self.params}) > 1:
            raise ValueError("shared: expected all parameters to be sharded by fully_shard or none, got both kinds: "
                             "call fully_shard on the whole model, too")  # fmt: skip

    def view(self, flat: Tensor, k: int) -> Tensor:
        """Parameter k's part of a flat vector [m], in the parameter's shape and strides (no copy)."""
        p = self.pieces[k]
        part = flat[self.starts[k] : self.starts[k] + p.numel()]
        return part.as_strided(p.shape, p.stride()) if self.dense[k] else part.view(p.shape)

    def views(self, flat: Tensor) -> list[Tensor]:
        return [self.view(flat, k) for k in range(len(self.params))]

    def flatten(self, tensors: Sequence[Tensor], *, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor per parameter -> one flat vector [m]."""
        flat = torch.empty(self.numel, dtype=dtype or self.dtype, device=self.device)
        for k, tensor in enumerate(tensors):
            self.view(flat, k).copy_(local(tensor))
        return flat

    def buffer(self, rows: int, out: Tensor | None = None) -> Tensor:
        """A [rows, m] buffer: ``out`` where it fits, else a new one."""
        if out is not None and out.shape == (rows, self.numel) and out.dtype == self.dtype:
            return out
        return torch.empty(rows, self.numel, dtype=self.dtype, device=self.device)


def _fills_its_memory(p: Tensor) -> bool:
    """Whether p's entries occupy p.numel() adjacent places, in whatever order."""
    expected = 1
    for stride, size in sorted((st, n) for st, n in zip(p.stride(), p.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


@dataclass
class TaskGradients:
    """Per-task gradients of one evaluation.

    Attributes:
        matrix: G [K, m] of the shared parameters.
        own: for each other parameter that was reached, task -> gradient.
        reached: indices (into the layout) of the shared parameters that some task reached.
    """

    matrix: Tensor
    own: dict[int, dict[int, Tensor]]
    reached: set[int]


@all_or_nothing
def task_gradients(losses: Losses, shared: Iterable[Tensor], *, out: Tensor | None = None) -> Tensor:
    """Gradient of every loss with respect to the shared parameters.

    The graph is freed afterwards. ``.grad`` of all parameters is left as it was.

    Args:
        losses: K scalar losses: a sequence or mapping of scalar tensors (preferred: tasks stay apart), or a tensor
            [K]; one made by ``torch.stack`` is taken apart again.
        shared: the parameters; their entries make up the m columns, in this order.
        out: optional buffer [K, m] to write into.

    Returns:
        G [K, m], float32 (float64 where a parameter is). A row, or a part of one, is zero where a task does not reach
        the parameter.

    Raises:
        TypeError, ValueError: ``losses`` is none of the above, or none of them has a graph; ``shared`` is empty.
    """
    params = tuple(shared)
    if not params:
        raise ValueError("shared: expected at least one parameter, got an empty iterable")
    tasks = split_losses(losses)
    return collect(tasks, Layout(params), (), out=out).matrix


def collect(
    tasks: TaskLosses,
    layout: Layout,
    own: Sequence[Tensor],
    *,
    out: Tensor | None = None,
    factor: float = 1.0,
    add_to: TaskGradients | None = None,
) -> TaskGradients:
    """K backward passes. Shared gradients go to one row each, all others are kept apart by task.

    Each gradient is moved into its row of G as soon as autograd has finished it, by a hook, so that no second full
    gradient is ever alive: the peak is the one [K, m] buffer.

    Args:
        factor: every gradient is multiplied by it (1 / number of micro-batches).
        add_to: gradients of earlier micro-batches to add to (in place).
    """
    result = add_to or TaskGradients(layout.buffer(len(tasks), out), {}, set())
    last = max((i for i, root in enumerate(tasks.roots) if root is not None), default=-1)
    with Capture(tasks, layout, own, result, adding=add_to is not None) as capture:
        for i, root in enumerate(tasks.roots):
            capture.begin(i)
            if root is not None:
                capture.backward([root], [factor], retain_graph=i < last)
            capture.end()
    return result


def _no_hook(p: Tensor) -> None:
    pass


class Capture:
    """While active, gradients that reach ``.grad`` of the parameters are taken from there. ``.grad`` itself is empty
    meanwhile (so that autograd hands over its tensor instead of adding) and is given back at the end."""

    def __init__(
        self, tasks: TaskLosses, layout: Layout, own: Sequence[Tensor], result: TaskGradients, *, adding: bool = False
    ) -> None:
        self.tasks, self.layout, self.result, self.adding = tasks, layout, result, adding
        self.inputs = [*layout.params, *own]
        self.sharded = [p for p in self.inputs if is_sharded(p)]
        self.unscale = None if tasks.scale is None else tasks.scale.reciprocal()

        self.active = False
        self.hook: Callable[[Tensor], None] = self._take  # one object, by which it is found again
        self.held: list[Tensor | None] = []

    def __enter__(self) -> Capture:
        _refuse_frozen(self.inputs)
        self.held = [p.grad for p in self.inputs]
        self.undoing = undoing(self._leave).__enter__()
        self.active = True
        for p in self.inputs:
            p.grad = None
            p.register_post_accumulate_grad_hook(self.hook)
        return self

    def __exit__(self, *exception: object) -> None:
        self.undoing.close()
        self.hook = _no_hook  # no cycle of references stays

    def _leave(self) -> None:
        self.active = False
        for p, grad in zip(self.inputs, self.held, strict=True):
            # Not by handles: one may be missing where the registration was interrupted.
            hooks = getattr(p, "_post_accumulate_grad_hooks", None) or {}
            for key in [key for key, hook in hooks.items() if hook is self.hook]:
                hooks.pop(key, None)
            p.grad = grad

    def begin(self, task: int) -> None:
        """Gradients are task's from here on."""
        self.task = task
        self.row = self.result.matrix[task] if self.layout.params else torch.empty(0)
        self.seen: set[int] = set()

    def end(self) -> None:
        """The task's row is complete: parameters that it did not reach have gradient zero."""
        if not self.adding:
            for k in range(len(self.layout.params)):
                if k not in self.seen:
                    self.layout.view(self.row, k).zero_()
        self.result.reached |= self.seen

    def backward(
        self, roots: Sequence[Tensor | GradientEdge], factors: Sequence[float | Tensor], *, retain_graph: bool
    ) -> None:
        """One backward pass from several roots, each times its factor (and the loss scale, taken off again)."""
        seeds = [self.tasks.seed(root, factor) for root, factor in zip(roots, factors, strict=True)]
        # FSDP2's parameters are not in the graph themselves: they get .grad at the end of a full backward pass.
        backward(roots, seeds, inputs=None if self.sharded else self.inputs, retain_graph=retain_graph)
        for p in self.sharded:
            self._take(p)

    def _take(self, p: Tensor) -> None:
        if not self.active:
            return
        grad, p.grad = p.grad, None
        if grad is None:
            return
        if self.unscale is not None:
            piece = local(grad)
            piece.mul_(self.unscale.to(piece.device, piece.dtype))
        k = self.layout.index.get(id(p))
        if k is None:
            grads = self.result.own.setdefault(id(p), {})
            grads[self.task] = grads[self.task] + grad if self.task in grads else grad
            return
        self.seen.add(k)
        grad = local(grad.to_dense() if grad.is_sparse else grad)
        target = self.layout.view(self.row, k)
        target.add_(grad) if self.adding else target.copy_(grad)


def _refuse_frozen(params: Sequence[Tensor]) -> None:
    frozen = [list(p.shape) for p in params if not p.requires_grad]
    if frozen:
        raise ValueError(f"shared: expected parameters with requires_grad=True, got {len(frozen)} without (shapes "
                         f"{frozen[:5]}): they get no gradient")  # fmt: skip


def combined_backward(
    tasks: TaskLosses, weights: Sequence[float | Tensor], inputs: Sequence[Tensor], *, retain_graph: bool = False
) -> list[Tensor | None]:
    """Gradient of sum_i weights[i] L_i in one backward pass; None for an input that no task reaches."""
    roots = [(root, w) for root, w in zip(tasks.roots, weights, strict=True) if root is not None]
    result = TaskGradients(torch.empty(0), {}, set())
    if inputs and roots:
        with Capture(tasks, Layout(()), inputs, result) as capture:
            capture.begin(0)
            capture.backward([root for root, _ in roots], [w for _, w in roots], retain_graph=retain_graph)
    return [result.own[id(p)][0] if id(p) in result.own else None for p in inputs]


def gramian(G: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """M = G G^T, accurate to 1e-6 relative to ||g_i|| ||g_j||, whatever m is.

    Partial products over :data:`CHUNK` columns in G's dtype, summed in float64. Autocast does not apply here.

    Args:
        G: task gradients [K, m].
        dtype: of the result; default G's own.

    Returns:
        M [K, K], symmetric, on G's device.
    """
    if G.dim() != 2:
        raise ValueError(f"G: expected task gradients [K, m], got shape {list(G.shape)}")
    wide = torch.float32 if G.device.type == "mps" else torch.float64
    work = G if G.dtype in (torch.float32, torch.float64) else G.float()
    K, m = G.shape
    whole = m - m % CHUNK
    # Many partial products in one call: threads share them, where a single skinny product leaves all but one idle.
    together = max(1, PRODUCTS // max(1, K * K))
    rows = max(1, K) if G.device.type != "cpu" else 4 if K <= 12 else 16  # at a time; K = 11: a fifth less time
    with torch.no_grad(), torch.autocast(G.device.type, enabled=False):
        rest = work[:, whole:]
        M = (rest @ rest.T).to(wide)
        for blocks in work[:, :whole].unflatten(1, (-1, CHUNK)).transpose(0, 1).split(together):
            for i in range(0, K, rows):  # M is symmetric: what is right of the diagonal tiles is not needed
                j = i + rows
                M[i:j, :j] += (blocks[:, i:j] @ blocks[:, :j].mT).sum(dim=0, dtype=wide)
    return (M.tril() + M.tril(-1).T).to(dtype or G.dtype)


def exact_gramian(G: Tensor) -> Tensor:
    """M [K, K] in float64 throughout: for gradients whose squares leave the range of float32 (about 1e-19 to 1e19), and
    for those that cancel so far that the digits of :func:`gramian` do not tell what is left. On G's device, or on the
    CPU where that has no float64 (mps)."""
    device = torch.device("cpu") if G.device.type == "mps" else G.device
    M = torch.zeros(len(G), len(G), dtype=torch.float64, device=device)
    with torch.no_grad(), torch.autocast(G.device.type, enabled=False):
        for part in G.split(BLOCK, dim=1):
            wide = part.to(device).double()
            M += wide @ wide.T
    return M


def gramian_noise(G: Tensor, *, exact: bool = False) -> float:
    """Rounding error of the entries of :func:`gramian` or :func:`exact_gramian`, relative to ||g_i|| ||g_j||."""
    known = EXACT_NOISE if exact else NOISE
    return known[torch.float64 if G.dtype == torch.float64 else torch.float32]


def norms(M: Tensor) -> Tensor:
    """Task gradient norms [K] from the Gramian [K, K]."""
    return M.diagonal().clamp_min(0).sqrt()


def cosines(M: Tensor) -> Tensor:
    """cos(g_i, g_0) [K] with the mean gradient g_0, from the Gramian [K, K]: g_i^T g_0 = (M 1)_i / K.

    0 where g_i or g_0 is zero. On M's device, without a synchronisation.
    """
    total = M.sum(dim=1)
    lengths = norms(M) * total.sum().clamp_min(0).sqrt()
    defined = lengths > 0
    cos = total / torch.where(defined, lengths, torch.ones_like(lengths))
    return torch.where(defined, cos.clamp(-1, 1), torch.zeros_like(cos))


def combine(G: Tensor, weights: Tensor, *, out: Tensor | None = None, wide: bool | None = None) -> Tensor:
    """d = G^T w: finite wherever the result is, also where a weight is beyond the range of G's dtype (1e40 for a
    gradient of 1e-30, in float32).

    Args:
        G: task gradients [K, m].
        weights: w [K], any floating dtype.
        out: optional [m] to write into; a row of G itself is allowed (each block of columns is read before it is
            written), which is how an optimizer step gets by without another [m].
        wide: whether weights or partial sums leave the range of G's dtype, which takes products in float64, block by
            block. None (default): looked up in the weights, for which the host waits if they are on a device.

    Returns:
        d [m] in G's dtype.

    Raises:
        ValueError: ``weights`` is not [K].
    """
    if weights.shape != (len(G),):
        raise ValueError(f"weights: expected shape [{len(G)}], one for each row of G, got {list(weights.shape)}")
    d = torch.empty(G.shape[1], dtype=G.dtype, device=G.device) if out is None else out
    wide = _leaves_range(weights, G.dtype) if wide is None else wide
    product = _wide_product(weights, G) if wide else partial(torch.matmul, weights.detach().to(G.device, G.dtype))
    with torch.no_grad(), torch.autocast(G.device.type, enabled=False):
        for part, target in zip(G.split(BLOCK, dim=1), d.split(BLOCK), strict=True):
            target.copy_(product(part))
    return d


def _leaves_range(weights: Tensor, dtype: torch.dtype) -> bool:
    """Whether a weight is too large or too small for the dtype."""
    used = weights.detach().double().abs() if weights.device.type != "mps" else weights.detach().cpu().double().abs()
    used = used[used > 0]
    return bool(((used > torch.finfo(dtype).max / 2) | (used < torch.finfo(dtype).tiny)).any())


def _wide_product(weights: Tensor, G: Tensor) -> Callable[[Tensor], Tensor]:
    """part [K, n] -> w @ part, in float64; on MPS, which has none, times two factors of every weight in turn, between
    which nothing leaves the range unless the result does."""
    if G.device.type != "mps":
        w = weights.detach().to(G.device, torch.float64)
        return lambda part: w @ part.double()
    w = weights.detach().cpu().double()
    first = torch.exp2((torch.frexp(w).exponent // 2).double())
    one, two = (f.to(G.device, G.dtype)[:, None] for f in (first, w / first))
    return lambda part: (part * one * two).sum(dim=0)


def trainable(params: Iterable[Tensor]) -> list[nn.Parameter]:
    """The distinct parameters that need a gradient, in order."""
    seen: dict[int, nn.Parameter] = {}
    for p in params:
        if p.requires_grad:
            seen.setdefault(id(p), p)  # type: ignore[arg-type]
    return list(seen.values())

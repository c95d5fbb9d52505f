"""What a step of COST costs without teleports, as a ratio to the naive way, in time and in memory.

The naive way: K calls of ``torch.autograd.grad`` for the shared parameters, copied into one [K, m] buffer, one
backward pass for the heads, the sum as ``.grad``, the base optimizer's step. Both sides take turns, step by step, so
that a busy machine slows both; by default on one thread and in processor time, which other work hardly changes
(``--threads 2`` takes wall time). Memory is the peak above what the model, its gradients and the optimizer hold,
in units of J, the size of the [K, m] buffer.

    python benchmarks/step.py [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import cost_mtl


class Net(nn.Module):
    """A trunk and K linear heads."""

    def __init__(self, trunk: nn.Module, width: int, K: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.heads = nn.ModuleList(nn.Linear(width, 1) for _ in range(K))

    def forward(self, x: Tensor) -> list[Tensor]:
        z = self.trunk(x)
        return [head(z) for head in self.heads]


def mlp(K: int, scale: float) -> tuple[Net, Tensor]:
    """About 10 M shared parameters at scale 1."""
    w = int(1820 * scale)
    trunk = nn.Sequential(nn.Linear(w, w), nn.ReLU(), nn.Linear(w, w), nn.ReLU(), nn.Linear(w, w), nn.ReLU())
    return Net(trunk, w, K), torch.randn(128, w)


def conv(K: int, scale: float) -> tuple[Net, Tensor]:
    """About 10 M shared parameters at scale 1, 16 x 16 images."""
    c = int(480 * scale)
    layers: list[nn.Module] = [nn.Conv2d(3, c, 3, stride=2, padding=1), nn.ReLU()]
    for _ in range(5):
        layers += [nn.Conv2d(c, c, 3, padding=1), nn.ReLU()]
    trunk = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Net(trunk, c, K), torch.randn(4, 3, 16, 16)


def losses_of(model: Net, x: Tensor) -> list[Tensor]:
    return [(out - i).square().mean() for i, out in enumerate(model(x))]


def naive_step(model: Net, base: torch.optim.Optimizer, x: Tensor, G: Tensor) -> None:
    shared = list(model.trunk.parameters())
    losses = losses_of(model, x)
    for i, loss in enumerate(losses):
        grads = torch.autograd.grad(loss, shared, retain_graph=True)
        torch.cat([g.reshape(-1) for g in grads], out=G[i])
    heads = list(model.heads.parameters())
    for p, g in zip(heads, torch.autograd.grad(sum(losses), heads), strict=True):
        p.grad = g
    start = 0
    d = G.sum(dim=0)
    for p in shared:
        p.grad = d[start : start + p.numel()].view_as(p)
        start += p.numel()
    base.step()


def contestants(kind: str, K: int, scale: float) -> dict[str, Callable[[], object]]:
    build = mlp if kind == "mlp" else conv
    steps: dict[str, Callable[[], object]] = {}
    for name in ("naive", "COST, equal", "COST, FairGrad"):
        torch.manual_seed(0)
        model, x = build(K, scale)
        base = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        if name == "naive":
            G = torch.empty(K, sum(p.numel() for p in model.trunk.parameters()))
            steps[name] = lambda model=model, base=base, x=x, G=G: naive_step(model, base, x, G)
        else:
            weighting = cost_mtl.EqualWeighting() if "equal" in name else cost_mtl.FairGrad(alpha=2.0)
            opt = cost_mtl.COST(base, model, shared=model.trunk, weighting=weighting, teleporter=None)
            steps[name] = lambda opt=opt, model=model, x=x: opt.step(losses_of, model, x)
    return steps


def time_ratio(kind: str, K: int, scale: float, repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """Median over rounds of each contestant's time divided by the naive one's in the same round."""
    steps = contestants(kind, K, scale)
    for step in steps.values():
        step()
    ratios: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(repeats):
        seconds = {}
        names = list(steps) if round_ % 2 else list(reversed(steps))
        for name in names:
            began = clock()
            steps[name]()
            seconds[name] = clock() - began
        for name in names:
            ratios[name].append(seconds[name] / seconds["naive"])
    return {name: statistics.median(values) for name, values in ratios.items()}


def resident() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096


def peak_memory(kind: str, K: int, scale: float, name: str) -> float:
    """Peak resident memory of two steps above that of a plain backward pass and step of the sum, in units of J."""
    torch.manual_seed(0)
    model, x = (mlp if kind == "mlp" else conv)(K, scale)
    base = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def plain() -> None:
        sum(losses_of(model, x)).backward()  # type: ignore[union-attr]
        base.step()

    m = sum(p.numel() for p in model.trunk.parameters())
    opt = cost_mtl.COST(base, model, shared=model.trunk, weighting=cost_mtl.FairGrad(2.0), teleporter=None)
    G = torch.empty(0)
    plain()
    before = watch(plain)
    for p in model.parameters():
        p.grad = None
    if name == "naive":
        G = torch.empty(K, m)
        after = watch(lambda: naive_step(model, base, x, G))
    else:
        after = watch(lambda: opt.step(losses_of, model, x))
    return (after - before) / (K * m * 4)


def watch(step: Callable[[], object]) -> int:
    """Peak resident memory, in bytes, during two calls."""
    peak, done = 0, threading.Event()

    def poll() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, resident())
            time.sleep(0.0005)

    thread = threading.Thread(target=poll)
    thread.start()
    step()
    step()
    done.set()
    thread.join()
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models: seconds, for a look that it runs")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", nargs=3, metavar=("KIND", "K", "NAME"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    scale = 0.1 if args.quick else 1.0
    if args.memory:
        kind, K, name = args.memory
        print(peak_memory(kind, int(K), scale, name))
        return
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print("| trunk | K | COST, equal | COST, FairGrad | memory, naive | memory, COST |")
    print("| --- | --- | --- | --- | --- | --- |")
    for kind in ("mlp", "conv"):
        for K in (3, 11):
            ratios = time_ratio(kind, K, scale, 3 if args.quick else args.repeats, clock)
            memory = []
            for name in ("naive", "cost"):
                # A process of its own for each: a freed block of memory stays resident.
                command = [sys.executable, __file__, "--memory", kind, str(K), name, *(["--quick"] * args.quick)]
                memory.append(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
            print(f"| {kind} | {K} | {ratios['COST, equal']:.3f} | {ratios['COST, FairGrad']:.3f} "
                  f"| {memory[0]:.2f} J | {memory[1]:.2f} J |")  # fmt: skip


if __name__ == "__main__":
    main()

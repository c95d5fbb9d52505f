"""Is the GPU right, and how long would the papers' tables take on it? Called by gpu_check.sh; works on a CPU too.

1. One step of FairGrad on the GPU against the same step on the CPU: losses, Gramian, weights, updated parameters.
2. Time of a step of SegNet-MTAN at the published size: plain Adam on the sum of the losses, COST with each weighting,
   and one teleport; peak memory; the hours of a whole run that follow from them.

    python benchmarks/gpu_check.py [--device cuda] [--quick]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from dense.losses import dense_losses
from dense.models import FILTERS, SegNetMTAN, head_channels
from dense.spec import CITYSCAPES, NYUV2, DenseSpec

import cost_mtl

TOLERANCE = 2e-3  # float32 sums in another order, through 60 batch norms
SECONDS_PER_ROW = 5.0  # twelve rows and the smoke runs must fit in four minutes
EPOCHS, START = 200, 50
BATCH = {"nyuv2": 2, "cityscapes": 8}


def random_batch(spec: DenseSpec, size: tuple[int, int], count: int, device: str) -> dict[str, Tensor]:
    """Images and targets with some invalid pixels, the same on every device."""
    generator = torch.Generator().manual_seed(0)
    shape = (count, *size)
    batch = {
        "image": torch.rand(count, 3, *size, generator=generator),
        "segmentation": torch.randint(-1, spec.classes, shape, generator=generator),
        "depth": torch.rand(count, 1, *size, generator=generator).round(decimals=1),
        "normal": functional.normalize(torch.randn(count, 3, *size, generator=generator)),
    }
    return {name: value.to(device) for name, value in batch.items()}


def make(spec: DenseSpec, filters: tuple[int, ...], device: str) -> SegNetMTAN:
    torch.manual_seed(0)
    return SegNetMTAN(head_channels(spec, spec.tasks), filters).to(device)


def closure_of(model: torch.nn.Module) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda batch: dense_losses(model(batch["image"]), batch)


# ------------------------------------------------------------------------------------------------ right?


def one_step(device: str) -> dict[str, Tensor]:
    """What one FairGrad step with plain SGD leaves behind (Adam would turn rounding noise into signs)."""
    model = make(NYUV2, (16, 32, 64, 128, 128), device)
    optimizer = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.1), model, teleporter=None)
    optimizer.step(closure_of(model), random_batch(NYUV2, (96, 128), 2, device))
    report = optimizer.last_step
    moved = torch.cat([p.detach().flatten() for p in model.parameters()])
    found = {"losses": report.losses, "Gramian": report.gramian, "weights": report.weights, "parameters": moved}
    return {name: value.double().cpu() for name, value in found.items()}


def compare(device: str) -> bool:
    """Print the relative differences between ``device`` and the CPU; True if all are inside the tolerance."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    here, there = one_step("cpu"), one_step(device)
    right = True
    print(f"{device} against cpu, relative difference (bound {TOLERANCE:g}):")
    for name in here:
        difference = ((here[name] - there[name]).norm() / here[name].norm()).item()
        right &= difference < TOLERANCE
        print(f"  {name:10} {difference:.1e}")
    return right


# ------------------------------------------------------------------------------------------------ how long?


def timed(run: Callable[[], object], device: str, repeats: int, warm_up: int = 2) -> float:
    """Median seconds of a call, after ``warm_up`` others; fewer than ``repeats`` on a slow device, but three."""
    times: list[float] = []
    for number in range(repeats + warm_up):
        synchronise(device)
        started = time.perf_counter()
        run()
        synchronise(device)
        if number >= warm_up:
            times.append(time.perf_counter() - started)
        if len(times) >= 3 and sum(times) > SECONDS_PER_ROW:
            break
    return statistics.median(times)


def synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def peak(device: str) -> str:
    if not device.startswith("cuda"):
        return "–"
    gib = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return f"{gib:.1f} GiB"


def time_methods(spec: DenseSpec, filters: tuple[int, ...], size: tuple[int, int], device: str, repeats: int) -> None:
    """Print a table for one data set."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    batch = random_batch(spec, size, BATCH[spec.name], device)
    base = make(spec, filters, device)
    print(f"\n{spec.name}: SegNet-MTAN {filters}, {BATCH[spec.name]} x {size[0]} x {size[1]}")
    print("| step | ms | peak memory | hours for 200 epochs |")
    print("| --- | --: | --: | --: |")
    # smaller sizes say nothing about a whole run
    steps = EPOCHS * -(-spec.counts[0] // BATCH[spec.name]) if size == spec.size else 0

    model = copy.deepcopy(base)
    plain = torch.optim.Adam(model.parameters(), lr=1e-4)

    def ordinary() -> None:
        plain.zero_grad()
        torch.stack(list(closure_of(model)(batch).values())).sum().backward()
        plain.step()

    report("Adam on the sum", timed(ordinary, device, repeats), 0.0, steps, device)
    step = 0.0
    for name, weighting in (
        ("COST, LS", cost_mtl.EqualWeighting()),
        ("COST, CAGrad", cost_mtl.CAGrad()),
        ("COST, Nash-MTL", cost_mtl.NashMTL()),
        ("COST, FairGrad", cost_mtl.FairGrad()),
    ):
        model = copy.deepcopy(base)
        optimizer = cost_mtl.COST(torch.optim.Adam(model.parameters(), lr=1e-4), model, weighting=weighting)
        closure = closure_of(model)
        step = timed(lambda o=optimizer, c=closure: o.step(c, batch), device, repeats)
        report(name, step, 0.0, steps, device)
    seconds = timed(lambda: optimizer.teleport(closure, batch), device, 1, warm_up=1)
    print(f"| one teleport (LoRA, rank 5) | {1000 * seconds:.0f} | {peak(device)} | = {seconds / step:.1f} steps |")
    report("FairGrad + COST", step, (EPOCHS - START) * seconds, steps, device)


def report(name: str, step: float, extra: float, steps: int, device: str) -> None:
    hours = f"{(steps * step + extra) / 3600:.1f}" if steps else "–"
    print(f"| {name} | {1000 * step:.1f} | {peak(device)} | {hours} |", flush=True)


def main() -> int:
    """Exit code 1 if the GPU disagrees with the CPU, 2 if there is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action=argparse.BooleanOptionalAction, default=False, help="tiny sizes, for a test")
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("error: no CUDA device here", file=sys.stderr)
        return 2
    if args.device.startswith("cuda"):
        print(torch.cuda.get_device_name(args.device))
    right = compare(args.device)
    filters = (8, 8, 16, 16, 16) if args.quick else FILTERS
    for spec in (NYUV2, CITYSCAPES):
        size = (32, 64) if args.quick else spec.size
        time_methods(spec, filters, size, args.device, 3 if args.quick else 20)
    if not right:
        print(f"error: {args.device} and cpu disagree", file=sys.stderr)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

"""What one teleport does, at many moments of conflict along real training runs.

At each moment the model and optimizer are copied and every teleporter is tried on the copy: losses kept on the batches
it used, on batches it never saw (train and eval mode), gradient norms, smallest cosine with the mean gradient, share
accepted, cost in ordinary steps (on top of the step that it happens in, whose evaluation it shares).

    python benchmarks/teleport.py [--problems qm9 multimnist toy] [--moments 50] [--out runs/teleport.json]
    python benchmarks/teleport.py --plot runs/teleport.png --moments 12    # the trade-offs as curves
    python benchmarks/teleport.py --share 3000    # part of a run's time at the default schedule
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from problems import Problem, multimnist, qm9
from teleport_curves import SWEEPS, plot
from teleport_toy import toy
from torch import Tensor, nn
from tqdm import tqdm

import cost_mtl
from cost_mtl import Acceptance, DenseTeleporter, LevelSet, LoRATeleporter, Penalty


@dataclass(frozen=True)
class Placebo:
    """A random move of a given length along the level set: the control."""

    length: float

    def propose(self, problem: Any) -> cost_mtl.Move:
        from cost_mtl.teleport.solvers.projection import project_out

        G = torch.cat(
            [problem.gradients, *(problem.evaluate_gradients(b)[1] for b in range(1, min(2, problem.batches)))]
        )
        u = torch.randn(G.shape[1], generator=problem.generator)
        s = project_out(G, u.to(G))
        theta = torch.cat([p.detach().flatten() for p in problem.params])
        used = tuple(range(min(2, problem.batches)))
        return cost_mtl.Move(s * (self.length * theta.norm() / s.norm()), "none", used=used)


OBJECTIVES = ("conflict", "conflict-exact", "norm", "norm-exact", "sharpness", "sphere")


def contestants(problem: str) -> dict[str, Any]:
    """Teleporters by name. The toy has no layer for an adapter, and its losses are kept on average."""

    def lora(**rule: float) -> LoRATeleporter:
        return LoRATeleporter(acceptance=Acceptance(**rule))

    if problem == "toy":
        named = {f"dense, {o}": DenseTeleporter(objective=o, invariance="mean") for o in ("auto", *OBJECTIVES)}
        return named | {
            "dense, every loss kept": DenseTeleporter(),
            "penalty, sphere (the paper's)": DenseTeleporter(solver=Penalty(), invariance="mean"),
            "penalty, norm-exact": DenseTeleporter("norm-exact", Penalty(), invariance="mean"),
        }
    return {
        "LoRA (default)": LoRATeleporter(),
        "dense": DenseTeleporter(),
        **{f"LoRA, {o}": LoRATeleporter(objective=o) for o in OBJECTIVES},
        "penalty, sphere (the paper's)": LoRATeleporter(solver=Penalty()),
        **{f"penalty, {o}": LoRATeleporter(objective=o, solver=Penalty()) for o in ("conflict-exact", "norm-exact")},
        "LoRA, held-out tolerance 2 %": lora(tolerance_heldout=0.02),
        "LoRA, held-out tolerance 10 %": lora(tolerance_heldout=0.1),
        "LoRA, 2 constraint batches": LoRATeleporter(solver=LevelSet(constraints=2)),
        "placebo 1 %": Placebo(0.01),
    }


def moments(
    problem: Problem, count: int, seed: int, every: int
) -> Sequence[tuple[nn.Module, cost_mtl.COST, list[Any]]]:
    """(model, optimizer, batches) at steps with a dominated conflict, at least ``every`` steps apart."""
    model = problem.model(seed)
    weighting = cost_mtl.EqualWeighting() if problem.name == "toy" else cost_mtl.FairGrad(alpha=2.0)
    opt = cost_mtl.COST(torch.optim.Adam(model.parameters(), lr=problem.lr), model, shared=model.trunk,
                        weighting=weighting, max_norm=None if problem.name == "toy" else 1.0,
                        schedule=cost_mtl.TeleportSchedule(start=10**9))  # fmt: skip
    stream = problem.batches(seed)
    found: list[tuple[nn.Module, cost_mtl.COST, list[Any]]] = []
    last = problem.warmup
    trigger = cost_mtl.DominatedConflict()
    for step in range(problem.warmup + 1000 * every):
        batch = next(stream)
        if step > every and step - last >= every:
            G = cost_mtl.task_gradients(problem.losses(model, *batch), model.trunk.parameters())
            if trigger(cost_mtl.gramian(G)):
                found.append((*copy.deepcopy((model, opt)), [batch, *(next(stream) for _ in range(4))]))
                last = step
        if len(found) == count:
            break
        opt.step(problem.losses, model, *batch)
    return found


def share_of_time(problem: Problem, steps: int) -> str:
    """Train with COST's defaults: attempts, and the part of the processor time that went into them and into
    asking second batches."""
    model = problem.model(0)
    opt = cost_mtl.COST(torch.optim.Adam(model.parameters(), lr=problem.lr), model, shared=model.trunk, max_norm=1.0)
    stream = problem.batches(0)
    ordinary, looked, asked, tried, accepted = [], [], 0, 0, 0
    for _ in tqdm(range(steps), desc=problem.name, leave=False):
        batch = next(stream)
        began = time.process_time()
        opt.step(problem.losses, model, *batch)
        seconds = time.process_time() - began
        (looked if opt.last_step.conflict else ordinary).append(seconds)
        asked += bool(opt.last_step.conflict)
        report = opt.last_step.teleport
        tried += report is not None
        accepted += report is not None and report.accepted
    extra = sum(looked) - len(looked) * statistics.median(ordinary)
    return (f"{problem.name}: {steps} steps, {asked} conflicts looked at, {tried} attempts, {accepted} accepted, "
            f"{extra / (sum(ordinary) + sum(looked)):.1%} of the time")  # fmt: skip


def drift(before: Tensor, after: Tensor) -> float:
    return float(((after - before).abs() / before.abs()).max())


def losses_on(problem: Problem, model: nn.Module, batch: Any) -> Tensor:
    with torch.no_grad():
        return torch.stack(list(problem.losses(model, *batch).values())).double()


def ordinary_step_seconds(problem: Problem, model: nn.Module, opt: cost_mtl.COST, batch: Any) -> float:
    model, opt = copy.deepcopy((model, opt))
    times = []
    for _ in range(5):
        began = time.process_time()
        opt.step(problem.losses, model, *batch)
        times.append(time.process_time() - began)
    return statistics.median(times)


def try_one(problem: Problem, moment: tuple[nn.Module, cost_mtl.COST, list[Any]], teleporter: Any) -> dict[str, Any]:
    """One attempt on a copy of the moment."""
    model, opt, batches = moment
    step_seconds = ordinary_step_seconds(problem, model, opt, batches[0])
    model, opt = copy.deepcopy((model, opt))
    opt._controller = copy.copy(opt._controller)
    object.__setattr__(opt._controller, "teleporter", teleporter)
    unseen = batches[1:]  # the optimizer remembers earlier ones
    before = [losses_on(problem, model, b) for b in unseen]
    model.eval()
    before_eval = [losses_on(problem, model, b) for b in unseen]
    model.train()
    state = [b.clone() for b in model.buffers()]
    began = time.process_time()
    report = opt.teleport(problem.losses, model, *batches[0])
    seconds = time.process_time() - began
    for b, saved in zip(model.buffers(), state, strict=True):
        b.copy_(saved)
    after = [losses_on(problem, model, b) for b in unseen]
    model.eval()
    after_eval = [losses_on(problem, model, b) for b in unseen]
    ratio, balanced = norm_ratios(report)
    return {
        "accepted": report.accepted,
        "reason": report.reason,
        "objective": report.objective,
        "drift": report.drift,
        "heldout": statistics.mean(drift(a, b) for a, b in zip(before, after, strict=True)),
        "heldout_eval": statistics.mean(drift(a, b) for a, b in zip(before_eval, after_eval, strict=True)),
        "norm_ratio": ratio,
        "balanced": balanced,
        "cos_before": float(report.cosines_before.min()),
        "cos_after": None if report.cosines_after is None else float(report.cosines_after.min()),
        "steps": seconds / step_seconds - 1,
        "calls": report.closure_calls,
        "length": report.length,
    }


def norm_ratios(report: cost_mtl.TeleportReport) -> tuple[float | None, float | None]:
    """Geometric mean over the tasks of (gradient norm after / before), plain and weighted by R_i (COST, Eqn 10)."""
    if report.norms_after is None:
        return None, None
    logs = report.norms_after.log() - report.norms_before.log()
    R = 1 - report.norms_before / report.norms_before.sum()
    return float(logs.mean().exp()), float(((R * logs).sum() / R.sum()).exp())


def gained(row: dict[str, Any]) -> bool:
    """Whether an accepted move kept its promise: the smallest cosine up by 0.03 where the conflict was what improved,
    the balanced gradient norms by 5 % where they were."""
    if row["objective"] == "conflict":
        return row["cos_after"] - row["cos_before"] >= 0.03
    return row["balanced"] >= 1.05


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    done = [r for r in rows if r["accepted"]]
    drifts = [r["drift"] for r in rows if r["drift"] is not None]
    every = f"{statistics.median(drifts):.2%}" if drifts else "–"
    steps = f"{statistics.median(r['steps'] for r in rows):.1f}"
    if not done:
        return ["0 %", "–", every, *["–"] * 5, steps, "–"]

    def median(key):
        return statistics.median(r[key] for r in done)

    count = {objective: sum(r["objective"] == objective for r in done) for objective in ("conflict", "norm")}
    good = sum(map(gained, done)) / len(done)
    return [
        f"{len(done) / len(rows):.0%} ({count['conflict']} + {count['norm']})",
        f"{max(r['drift'] for r in done):.2%}", every, f"{median('heldout'):.1%}", f"{median('heldout_eval'):.1%}",
        f"{median('norm_ratio'):.2f}", f"{median('cos_before'):+.3f} → {median('cos_after'):+.3f}", f"{good:.0%}",
        steps, f"{median('length'):.2%}",
    ]  # fmt: skip


HEADER = ["problem", "teleporter", "accepted (conflict + norm)", "largest drift, used batches", "median, all attempts",
          "held-out drift", "held-out, eval mode", "norm ratio", "smallest cosine", "promise kept", "cost in steps",
          "length"]  # fmt: skip

PROBLEMS = {"qm9": qm9, "multimnist": multimnist, "toy": toy}


def sweep(problems: dict[str, Any], path: Path) -> None:
    """Every setting of the curves, on every problem's moments."""
    results: dict[str, Any] = {}
    for name, (problem, found) in problems.items():
        for family, settings in SWEEPS.items():
            for label, teleporter in settings.items():
                rows = [
                    try_one(problem, m, teleporter) for m in tqdm(found, desc=f"{name}, {family}, {label}", leave=False)
                ]
                results.setdefault(name, {}).setdefault(family, {})[label] = rows
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(results, indent=1))
    plot(path, results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--every", type=int, default=15, help="least number of steps between two moments")
    parser.add_argument("--only", nargs="+", help="names of teleporters")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--plot", type=Path, help="draw the trade-offs of the networks into this PNG instead of the table"
    )
    parser.add_argument("--share", type=int, metavar="STEPS", help="train the networks so long instead of the table")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.share:
        for name in args.problems:
            if name != "toy":
                print(share_of_time(PROBLEMS[name](), args.share), flush=True)
        return
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    found = {}
    for name in args.problems:
        problem: Problem = PROBLEMS[name]()
        seeds = (0, 1) if name == "toy" else (0,)
        parts = [moments(problem, args.moments // len(seeds), seed, args.every) for seed in seeds]
        found[name] = (problem, [moment for part in parts for moment in part])
    if args.plot:
        sweep({name: pair for name, pair in found.items() if name != "toy"}, args.plot)
        return
    print("| " + " | ".join(HEADER) + " |\n|" + " --- |" * len(HEADER))
    for name, (problem, where) in found.items():
        for label, teleporter in contestants(name).items():
            if args.only and label not in args.only:
                continue
            rows = [try_one(problem, m, teleporter) for m in tqdm(where, desc=f"{name}, {label}", leave=False)]
            results.setdefault(name, {})[label] = rows
            print("| " + " | ".join([f"{name} ({len(rows)})", label, *summary(rows)]) + " |", flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

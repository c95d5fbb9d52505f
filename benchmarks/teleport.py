"""What one teleport does, at many moments of conflict along real training runs.

At each moment the model and optimizer are copied and every teleporter is tried on the copy: losses kept on the batches
it used, on batches it never saw (train and eval mode), gradient norms, smallest cosine with the mean gradient, share
accepted, cost in ordinary steps (on top of the step that it happens in, whose evaluation it shares).

    python benchmarks/teleport.py [--problems qm9 multimnist] [--moments 50] [--out runs/teleport.json]
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
from problems import Heads, Problem, multimnist, qm9
from torch import Tensor
from tqdm import tqdm

import cost_mtl
from cost_mtl import Acceptance, DenseTeleporter, LevelSet, LoRATeleporter


@dataclass(frozen=True)
class Placebo:
    """A random move of a given length along the level set: the control."""

    length: float

    def propose(self, problem: Any) -> cost_mtl.Move:
        from cost_mtl.teleport.objective import project_out

        G = torch.cat(
            [problem.gradients, *(problem.evaluate_gradients(b)[1] for b in range(1, min(2, problem.batches)))]
        )
        u = torch.randn(G.shape[1], generator=problem.generator)
        s = project_out(G, u.to(G))
        theta = torch.cat([p.detach().flatten() for p in problem.params])
        used = tuple(range(min(2, problem.batches)))
        return cost_mtl.Move(s * (self.length * theta.norm() / s.norm()), "none", used=used)


def contestants() -> dict[str, Any]:
    def lora(**rule: float) -> LoRATeleporter:
        return LoRATeleporter(acceptance=Acceptance(**rule))

    return {
        "LoRA (default)": LoRATeleporter(),
        "LoRA, norm": LoRATeleporter(objective="norm"),
        "dense": DenseTeleporter(),
        "LoRA, held-out tolerance 2 %": lora(tolerance_heldout=0.02),
        "LoRA, held-out tolerance 10 %": lora(tolerance_heldout=0.1),
        "LoRA, 2 constraint batches": LoRATeleporter(solver=LevelSet(constraints=2)),
        "placebo 1 %": Placebo(0.01),
    }


def moments(problem: Problem, count: int, seed: int, every: int) -> Sequence[tuple[Heads, cost_mtl.COST, list[Any]]]:
    """(model, optimizer, batches) at steps with a dominated conflict, at least ``every`` steps apart."""
    model = problem.model(seed)
    opt = cost_mtl.COST(torch.optim.Adam(model.parameters(), lr=problem.lr), model, shared=model.trunk, max_norm=1.0,
                        schedule=cost_mtl.TeleportSchedule(start=10**9))  # fmt: skip
    stream = problem.batches(seed)
    found: list[tuple[Heads, cost_mtl.COST, list[Any]]] = []
    last = 0
    trigger = cost_mtl.DominatedConflict()
    for step in range(200 * every):
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


def drift(before: Tensor, after: Tensor) -> float:
    return float(((after - before).abs() / before.abs()).max())


def losses_on(problem: Problem, model: Heads, batch: Any) -> Tensor:
    with torch.no_grad():
        return torch.stack(list(problem.losses(model, *batch).values())).double()


def ordinary_step_seconds(problem: Problem, model: Heads, opt: cost_mtl.COST, batch: Any) -> float:
    model, opt = copy.deepcopy((model, opt))
    times = []
    for _ in range(5):
        began = time.process_time()
        opt.step(problem.losses, model, *batch)
        times.append(time.process_time() - began)
    return statistics.median(times)


def try_one(problem: Problem, moment: tuple[Heads, cost_mtl.COST, list[Any]], teleporter: Any) -> dict[str, Any]:
    """One attempt on a copy of the moment."""
    model, opt, batches = moment
    step_seconds = ordinary_step_seconds(problem, model, opt, batches[0])
    model, opt = copy.deepcopy((model, opt))
    opt._driver = copy.copy(opt._driver)
    object.__setattr__(opt._driver, "teleporter", teleporter)
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
    ratio = None if report.norms_after is None else float((report.norms_after.log() - report.norms_before.log()).mean().exp())  # noqa: E501  # fmt: skip
    return {
        "accepted": report.accepted,
        "reason": report.reason,
        "objective": report.objective,
        "drift": report.drift,
        "heldout": statistics.mean(drift(a, b) for a, b in zip(before, after, strict=True)),
        "heldout_eval": statistics.mean(drift(a, b) for a, b in zip(before_eval, after_eval, strict=True)),
        "norm_ratio": ratio,
        "cos_before": float(report.cosines_before.min()),
        "cos_after": None if report.cosines_after is None else float(report.cosines_after.min()),
        "steps": seconds / step_seconds - 1,
        "calls": report.closure_calls,
        "length": report.length,
    }


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    done = [r for r in rows if r["accepted"]]
    if not done:
        return ["0 %", *["–"] * 8]

    def median(key):
        return statistics.median(r[key] for r in done)

    gains = [r["cos_after"] - r["cos_before"] for r in done]
    good = sum(g >= 0.03 or r["norm_ratio"] >= 1.05 for g, r in zip(gains, done, strict=True))
    return [
        f"{len(done) / len(rows):.0%}", f"{max(r['drift'] for r in done):.2%}", f"{median('heldout'):.1%}",
        f"{median('heldout_eval'):.1%}", f"{median('norm_ratio'):.2f}",
        f"{median('cos_before'):+.3f} → {median('cos_after'):+.3f}", f"{good / len(done):.0%}",
        f"{statistics.median(r['steps'] for r in rows):.1f}", f"{median('length'):.2%}",
    ]  # fmt: skip


HEADER = ["problem", "teleporter", "accepted", "largest drift, used batches", "held-out drift", "held-out, eval mode",
          "norm ratio", "smallest cosine", "gain ≥ 0.03 or 5 %", "cost in steps", "length"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", default=["qm9", "multimnist"], choices=["qm9", "multimnist"])
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--every", type=int, default=15, help="least number of steps between two moments")
    parser.add_argument("--only", nargs="+", help="names of teleporters")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    print("| " + " | ".join(HEADER) + " |\n|" + " --- |" * len(HEADER))
    for name in args.problems:
        problem: Problem = qm9() if name == "qm9" else multimnist()
        found = moments(problem, args.moments, 0, args.every)
        for label, teleporter in contestants().items():
            if args.only and label not in args.only:
                continue
            rows = [try_one(problem, m, teleporter) for m in tqdm(found, desc=f"{name}, {label}", leave=False)]
            results.setdefault(name, {})[label] = rows
            print("| " + " | ".join([f"{name} ({len(rows)})", label, *summary(rows)]) + " |", flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

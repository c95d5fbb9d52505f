"""A report says whose it is, and prints as a short table."""

import torch

from cost_mtl import COST, TeleportSchedule
from tests.nets import conflicting, losses


def test_a_report_knows_its_step_and_tasks_and_prints_what_it_knows():
    model, x, ys = conflicting()
    optimizer = COST(torch.optim.SGD(model.parameters(), lr=1e-3), model, shared=model.trunk,
                     schedule=TeleportSchedule(start=2, cooldown=1, confirm=False))  # fmt: skip

    def named(model, x, ys):
        return dict(zip(("left", "right", "a task with a long name"), losses(model, x, ys), strict=False))

    reports = []
    for step in range(4):
        optimizer.step(named, model, x, ys)
        if optimizer.last_step.teleport is not None:
            reports.append((step, optimizer.last_step.teleport))
    reports.append((4, optimizer.teleport(named, model, x, ys)))
    assert len(reports) > 1
    for step, report in reports:
        names = tuple(named(model, x, ys))
        assert (report.step, report.names) == (step, names)
        text = str(report)
        verdict = "accepted" if report.accepted else "rejected"
        assert text.startswith(f"teleport in step {step} {verdict}: {report.reason}\n")
        rows = {line.split("  ")[0]: line for line in text.splitlines()}
        for i, name in enumerate(names):
            assert f"{float(report.norms_before[i]):.4g}" in rows[name]
            assert f"{float(report.cosines_before[i]):+.3f}" in rows[name]
            change = float(report.losses_after[i] / report.losses_before[i]) - 1
            assert f"{100 * change:+.2f} %" in rows[name]
        assert f"{report.closure_calls} closure calls" in text

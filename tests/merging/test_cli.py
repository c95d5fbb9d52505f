"""``cost-mtl merge``: the words, the exit status, the one line that says what is wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from cost_mtl.merging import TaskVector, breadcrumbs, combine, dare, task_arithmetic, ties
from cost_mtl.merging.cli import main


@pytest.fixture
def files(tmp_path, state):
    """A base and two fine-tunings, one file each."""
    states = {name: state(seed) for seed, name in enumerate(("base", "one", "two"))}
    for name, values in states.items():
        save_file(values, tmp_path / f"{name}.safetensors", {"format": "pt"})
    return tmp_path, states


def words(folder, *extra, out="out.safetensors"):
    models = [str(folder / "one.safetensors"), str(folder / "two.safetensors")]
    start = ["merge", "--base", str(folder / "base.safetensors"), "--models", *models, "--quiet"]
    return [*start, *(["--out", str(folder / out)] if out else []), *extra]


METHODS = {
    "task_arithmetic": lambda base, taus: combine(taus, [1, 1]),
    "average": lambda base, taus: combine(taus, [0.5, 0.5]),
    "ties": lambda base, taus: ties(taus, 0.2),
    "dare": lambda base, taus: combine([dare(taus[0], 0.1, 7), dare(taus[1], 0.1, 8)], [1, 1]),
    "breadcrumbs": lambda base, taus: combine([breadcrumbs(tau, 0.2, 0.9) for tau in taus], [1, 1]),
}


@pytest.mark.parametrize("method", METHODS)
def test_each_method_is_the_function_of_that_name(files, method):
    folder, states = files
    own = {"dare": ["--seed", "7"], "breadcrumbs": ["--lower", "0.2", "--upper", "0.9"]}
    options = ["--method", method, "--scale", "0.4", *own.get(method, [])]
    assert main(words(folder, *options)) == 0
    base = states["base"]
    taus = [TaskVector(base, states[name]) for name in ("one", "two")]
    expected = METHODS[method](base, taus).apply_to(base, 0.4)
    merged = load_file(folder / "out.safetensors")
    for key, value in expected.items():
        torch.testing.assert_close(merged[key], value)


def test_weights_and_negation(files):
    folder, states = files
    assert main(words(folder, "--weights", "0.5", "-1")) == 0
    expected = task_arithmetic(states["base"], [states["one"], states["two"]], [0.5, -1.0])
    torch.testing.assert_close(load_file(folder / "out.safetensors")["a.weight"], expected["a.weight"])


@pytest.mark.parametrize("value", ["nan", "inf", "1e39"])
@pytest.mark.parametrize("method", ["task_arithmetic", "average", "ties", "dare", "breadcrumbs"])
def test_factors_that_no_weight_can_take_are_one_line(files, capsys, method, value):
    folder, _ = files
    before = sorted(os.listdir(folder))
    for option, words_of in (("--scale", [value]), ("--weights", ["1", value])):
        assert main(words(folder, option, *words_of, "--method", method)) == 1
        assert re.fullmatch(rf"cost-mtl merge: error: {option[2:]}: expected a finite .*\n", capsys.readouterr().err)
        assert sorted(os.listdir(folder)) == before


def test_dry_run_reports_and_writes_nothing(files, capsys):
    folder, states = files
    before = sorted(os.listdir(folder))
    assert main(words(folder, "--dry-run", "--json", out=None)) == 0
    assert sorted(os.listdir(folder)) == before
    report = json.loads(capsys.readouterr().out)
    taus = [TaskVector(states["base"], states[name]) for name in ("one", "two")]
    assert [model["norm"] for model in report["models"]] == pytest.approx([tau.norm() for tau in taus])
    assert report["cosines"][0][1] == pytest.approx(taus[0].cosine(taus[1]))
    assert report["cosines"][1][1] == pytest.approx(1)
    assert report["base"] == {
        "tensors": 3,
        "bytes": 28 * 4,
        "shards": 1,
        "dtypes": ["float32"],
        "batchnorm_statistics": 0,
    }
    assert main(words(folder, "--dry-run", "--keys", "intersection", out=None)) == 0
    text = capsys.readouterr().out
    assert "cosines of the task vectors" in text
    assert re.search(r"one\.safetensors +3 +0 +0", text)


WRONG = {
    "no output": ([], None, "--out: expected a path"),
    "weights": (["--weights", "1"], "x.safetensors", "--weights: expected one for each of the 2 models, got 1"),
    "density": (["--method", "ties", "--density", "0"], "x.safetensors", "density: expected a number in"),
    "crumbs": (["--method", "breadcrumbs", "--lower", "0.9", "--upper", "0.1"], "x.safetensors", "lower, upper"),
    "foreign option": (
        ["--density", "0.5"],
        "x.safetensors",
        "--density: expected --method ties or dare, got task_arithmetic",
    ),
    "pattern": (["--exclude", "zzz*"], "x.safetensors", "expected patterns that match a key"),
    "folder": ([], "no/such/x.safetensors", "expected an existing folder"),
    "existing": ([], "one.safetensors", "expected a path that does not exist"),
    "overflow": (["--scale", "1e30", "--dtype", "float16"], "x.safetensors", "NaN or infinity in torch.float16"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_one_line_and_exit_status_1(files, capsys, case):
    folder, _ = files
    extra, out, message = WRONG[case]
    before = sorted(os.listdir(folder))
    assert main(words(folder, *extra, out=out)) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("cost-mtl merge: error: ")
    assert errors.count("\n") == 1
    assert message in errors
    assert sorted(os.listdir(folder)) == before


@pytest.mark.parametrize("argv", [[], ["merge"], ["merge", "--base", "x"], ["split"], ["merge", "--method", "magic"]])
def test_wrong_usage_is_exit_status_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: cost-mtl" in capsys.readouterr().err


def test_warnings_are_one_line_on_standard_error(tmp_path, normed, perturb, capsys):
    tuned = perturb(normed, 1)
    tuned[1].running_var.fill_(2)
    for name, model in (("base", normed), ("one", tuned), ("two", tuned)):
        save_file(model.state_dict(), tmp_path / f"{name}.safetensors")
    assert main(words(tmp_path)) == 0
    errors = capsys.readouterr().err
    assert errors.startswith("cost-mtl merge: warning: the fine-tuned models have other BatchNorm statistics")
    assert errors.count("\n") == 1


def test_the_installed_command(files):
    folder, _ = files
    command = os.path.join(os.path.dirname(sys.executable), "cost-mtl")
    start = (
        [command]
        if os.path.exists(command)
        else [sys.executable, "-c", "from cost_mtl.merging.cli import *; exit(main())"]
    )
    done = subprocess.run([*start, *words(folder)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    help_text = subprocess.run([*start, "merge", "--help"], capture_output=True, text=True, check=True).stdout
    assert "exit status" in help_text


SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from cost_mtl.merging import files
from cost_mtl.merging.cli import main
real = files.merged_tensor
def slow(*args, **kwargs):
    print("working", flush=True)
    time.sleep(0.3)
    return real(*args, **kwargs)
files.merged_tensor = slow
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("again", [False, True], ids=["one signal", "and SIGHUP"])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_an_interrupted_command_leaves_nothing(files, number, status, again):
    folder, _ = files
    before = sorted(os.listdir(folder))
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, *words(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "working\n"
    assert len(os.listdir(folder)) == len(before) + 1  # the temporary file
    time.sleep(0.05)
    process.send_signal(number)
    if again:  # as a terminal that closes: the first one to be handled says the status
        process.send_signal(signal.SIGHUP)
    _, errors = process.communicate(timeout=30)
    assert process.returncode in ((status, 129) if again else (status,))
    assert sorted(os.listdir(folder)) == before
    assert "Traceback" not in errors


def test_an_ignored_hangup_stays_ignored(files):
    """As under nohup."""
    folder, _ = files
    start = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + SLOW
    process = subprocess.Popen([sys.executable, "-c", start, *words(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "working\n"
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert (folder / "out.safetensors").is_file()


@pytest.mark.parametrize("weights", [["0.75", "0.25"], ["3", "1"], ["0.1", "1"], ["0", "2"], ["7", "7"]])
def test_an_average_of_one_model_is_that_model(files, weights):
    folder, states = files
    save_file(states["one"], folder / "two.safetensors")
    assert main(words(folder, "--method", "average", "--weights", *weights)) == 0
    for key, value in load_file(folder / "out.safetensors").items():
        torch.testing.assert_close(value, states["one"][key])


def test_a_weighted_average_is_the_convex_combination(files):
    folder, states = files
    assert main(words(folder, "--method", "average", "--weights", "3", "1")) == 0
    for key, value in load_file(folder / "out.safetensors").items():
        torch.testing.assert_close(value, 0.75 * states["one"][key] + 0.25 * states["two"][key])


@pytest.mark.parametrize("weights", [["0", "0"], ["1", "-1"], ["-1", "-3"]])
def test_weights_of_no_average_are_one_line(files, capsys, weights):
    folder, _ = files
    assert main(words(folder, "--method", "average", "--weights", *weights)) == 1
    assert re.fullmatch(r"cost-mtl merge: error: --weights: expected numbers >= 0 .*\n", capsys.readouterr().err)

"""docs/api.md says what the code says."""

import importlib.util
from pathlib import Path

import cost_mtl
import cost_mtl.merging

SCRIPT = Path(__file__).parents[2] / "docs" / "make_api.py"


def made():
    spec = importlib.util.spec_from_file_location("make_api", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_script_writes_now():
    assert made().page() == SCRIPT.with_name("api.md").read_text(), "run: python docs/make_api.py"


def test_every_public_class_and_function_is_on_it():
    page = made().page()
    for module in (cost_mtl, cost_mtl.merging):
        for name in module.__all__:
            thing = getattr(module, name)
            if isinstance(thing, type) or hasattr(thing, "__code__"):
                assert f"| `{name}" in page, name


def test_signatures_are_short_and_lose_no_argument():
    script = made()
    assert script.signature("CAGrad", cost_mtl.CAGrad).startswith("CAGrad(c=0.4, ")
    cost = script.signature("COST", cost_mtl.COST)
    assert "weighting=FairGrad(scale='project')" in cost
    assert "teleporter=LoRATeleporter()" in cost
    assert script.signature("Trigger", cost_mtl.Trigger) == "Trigger"

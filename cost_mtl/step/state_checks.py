"""A checkpoint is looked at as a whole before any of it is loaded: types, lengths, ranges, finiteness."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from cost_mtl._torch.dtensor import local
from cost_mtl._torch.param_groups import held_by
from cost_mtl.step.base_checks import odd_setting, odd_state

_PLAIN = (bool, int, float, str, bytes, type(None))

MANY_SUMS = 100_000
"""Sums of parameter sizes that are tried before a length is taken for one of them."""


def is_plain(value: Any) -> bool:
    """Whether ``torch.load(weights_only=True)`` gives the value back: tensors, numbers, strings, and dicts, lists and
    tuples of them."""
    if type(value) in _PLAIN or type(value) in (Tensor, torch.nn.Parameter):
        return True
    if type(value) in (list, tuple):
        return all(is_plain(item) for item in value)
    if type(value) is dict:
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    return False


def refuse(field: str, expected: str, value: Any) -> None:
    """Raises ValueError that names a field of ``state_dict()["cost"]``."""
    raise ValueError(f"state_dict['cost']{field}: expected {expected}, got {_describe(value)}")


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        odd = "" if not value.is_floating_point() or bool(torch.isfinite(value).all()) else ", not finite"
        return f"a tensor of shape {list(value.shape)} and {value.dtype}{odd}"
    if isinstance(value, list | tuple | dict) and len(value) > 4:
        return f"a {type(value).__name__} of length {len(value)}"
    text = repr(value)
    text = text if len(text) <= 80 else f"{text[:77]}..."
    return (
        text if isinstance(value, int | float | list | tuple | dict | type(None)) else f"{type(value).__name__} {text}"
    )


@dataclass(frozen=True)
class Frame:
    """What a state has to fit.

    Attributes:
        sizes: numbers of entries of the model's parameters.
        given: the same of the shared parameters, where the user has named them; else None.
        weighting: the weighting.
    """

    sizes: Sequence[int]
    given: Sequence[int] | None
    weighting: Any

    def shared(self, indices: Sequence[int]) -> list[int]:
        """Sizes of the shared parameters."""
        return [self.sizes[k] for k in indices] if self.given is None else list(self.given)


def check_progress(state: Mapping[str, Any], frame: Frame | None, *, same_method: bool) -> None:
    """Look at every field of ``state_dict()["cost"]``, all of which are there.

    Args:
        frame: None: only what can be said of the state alone.
        same_method: its weighting's state is of the weighting in ``frame``.

    Raises:
        ValueError: a field is not what :meth:`cost_mtl.step.state.Progress.pack` makes of one.
    """
    for name in ("step", "skipped", "attempts", "memory_lost"):
        if not _is_count(state[name]):
            refuse(f"['{name}']", "an integer >= 0", state[name])
    step = state["step"]
    if state["skipped"] > step:
        refuse("['skipped']", f"at most its step, {step}", state["skipped"])
    for name in ("last_attempt", "last_asked"):
        value = state.get(name)
        if not (value is None or (_is_count(value) and value <= step)):
            refuse(f"['{name}']", f"None or an integer from 0 to its step, {step}", value)
    if (state["last_attempt"] is None) != (state["attempts"] == 0):
        refuse("['last_attempt']", f"a number exactly where there were attempts ({state['attempts']})",
               state["last_attempt"])  # fmt: skip
    sigma = state["sigma"]
    if not (sigma is None or (isinstance(sigma, float) and 0.0 <= sigma <= 1.0)):
        refuse("['sigma']", "None or a number in [0, 1]", sigma)
    _check_tasks(state)
    _check_shared(state, frame)
    _check_memory(state)
    _check_weighting(state, frame if same_method else None)


def _check_tasks(state: Mapping[str, Any]) -> None:
    tasks, names, weights = state["num_tasks"], state.get("names", []), state["weights"]
    if not (tasks is None or (_is_count(tasks) and tasks > 0)):
        refuse("['num_tasks']", "None or an integer >= 1", tasks)
    if type(names) is not list or not all(type(name) is str for name in names):
        refuse("['names']", "a list of strings", names)
    if names and tasks is not None and len(names) != tasks:
        refuse("['names']", f"as many as num_tasks, {tasks}", names)
    _check_weights(weights, names, tasks)
    present = state.get("present", [])
    if type(present) is not list or not all(type(n) is str and n in names for n in present):
        refuse("['present']", f"a list of tasks among {names}", present)


def _check_weights(weights: Any, names: Sequence[str], tasks: int | None) -> None:
    if weights is None:
        return
    if isinstance(weights, Tensor):  # as kept by releases that had no names for them
        if not _is_vector(weights) or (tasks is not None and len(weights) != tasks):
            refuse("['weights']", f"{'num_tasks' if tasks is None else tasks} finite numbers", weights)
    elif type(weights) is not dict or not set(weights) <= set(names) or not all(map(_is_number, weights.values())):
        refuse("['weights']", f"None, or task name -> finite number, of {list(names)}", weights)


def _check_shared(state: Mapping[str, Any], frame: Frame | None) -> None:
    shared = state["shared"]
    if type(shared) is not list or not all(map(_is_count, shared)) or shared != sorted(set(shared)):
        refuse("['shared']", "a list of distinct indices of parameters, in order", shared)
    if frame is not None and shared and shared[-1] >= len(frame.sizes):
        refuse("['shared']", f"indices of the model's {len(frame.sizes)} parameters", shared)
    if type(state["iterates"]) is not list:
        refuse("['iterates']", "a list of tensors", state["iterates"])
    vectors = [(f"['iterates'][{i}]", t) for i, t in enumerate(state["iterates"])]
    vectors += [("['direction']", state["direction"])] if state["direction"] is not None else []
    for field, vector in vectors:
        if not _is_vector(vector):
            refuse(field, "a vector of finite numbers", vector)
        if frame is not None and not _is_sum_of_some(len(vector), frame.shared(shared)):
            refuse(field, f"the entries of shared parameters, which have {sum(frame.shared(shared))} in all", vector)


def _check_memory(state: Mapping[str, Any]) -> None:
    memory = state["memory"]
    if type(memory) is not list:
        refuse("['memory']", "a list of batches", memory)
    for i, batch in enumerate(memory):
        if type(batch) is not tuple or not is_plain(batch):
            refuse(f"['memory'][{i}]", "a tuple of tensors, numbers, strings and plain containers", batch)
    if "memory_of" not in state:  # in checkpoints of before
        return
    of = state["memory_of"]
    if type(of) is not list or len(of) != len(memory):
        refuse("['memory_of']", f"a list of {len(memory)}, one for each batch in memory", of)
    for i, entry in enumerate(of):
        if type(entry) is not dict or set(entry) != {"names", "closures"} or not all(map(_is_listed, entry.values())):
            refuse(f"['memory_of'][{i}]", "names and closures, lists of strings or None", entry)


def _check_weighting(state: Mapping[str, Any], frame: Frame | None) -> None:
    saved, tasks = state["weighting"], state["num_tasks"]
    if type(saved) is not dict or not is_plain(saved):
        refuse("['weighting']", "a dict of tensors, numbers, strings and plain containers", saved)
    if frame is None or tasks is None:
        return
    if hasattr(frame.weighting, "read_state"):
        try:
            frame.weighting.read_state(saved, state.get("names") or [str(i) for i in range(tasks)])
        except ValueError as error:
            raise ValueError(f"state_dict['cost']['weighting']{error}") from None
        return
    start = frame.weighting.initial_state(tasks)
    if type(frame.weighting).__module__.startswith("cost_mtl."):
        if set(saved) != set(start):
            refuse("['weighting']", f"a dict with the keys {sorted(start)}", saved)
        _compare("['weighting']", start, saved, tasks)
    elif not set(start) <= set(saved):
        refuse("['weighting']", f"the keys {sorted(map(str, start))}", sorted(map(str, saved)))


def _compare(field: str, start: Any, value: Any, tasks: int) -> None:
    """A value of a weighting's state against what it was at first."""
    if isinstance(start, dict):
        if type(value) is not dict or (start and set(value) != set(start)):
            refuse(field, f"a dict with the keys {sorted(map(str, start))}", value)
        for key in start:
            _compare(f"{field}[{key!r}]", start[key], value[key], tasks)
    elif isinstance(start, Tensor):
        if not _is_finite(value) or value.shape != start.shape:
            refuse(field, f"a tensor of shape {list(start.shape)}, finite", value)
    elif start is None:
        if not (value is None or (_is_vector(value) and len(value) == tasks)):
            refuse(field, f"None or {tasks} finite numbers in a tensor", value)
    elif isinstance(start, int) and not isinstance(start, bool):
        if not _is_count(value):
            refuse(field, "an integer >= 0", value)
    elif type(value) is not type(start) or (isinstance(value, float) and not math.isfinite(value)):
        refuse(field, f"a {type(start).__name__}", value)


def _is_number(value: Any) -> bool:
    return type(value) is float and math.isfinite(value)


def _is_listed(value: Any) -> bool:
    return value is None or (type(value) is list and all(type(item) is str for item in value))


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_finite(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and bool(torch.isfinite(value).all())


def _is_vector(value: Any) -> bool:
    return _is_finite(value) and value.dim() == 1


def _is_sum_of_some(length: int, sizes: Sequence[int]) -> bool:
    """Whether some of the parameters (some may have been frozen, or not yet found to be shared) have so many entries
    together; True where there are too many sums to say."""
    if length in (0, sum(sizes)):
        return True
    sums = {0}
    for size in sizes:
        sums |= {s + size for s in sums if s + size <= length}
        if length in sums or len(sums) > MANY_SUMS:
            return True
    return False


# ------------------------------------------------------------------------------------------ the base optimizer's part

OF_THE_PARAMETERS_SHAPE = (
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta",
    "sum", "prev", "step_size", "ax",
)  # fmt: skip
"""Names that torch's own optimizers give to state of the parameter's shape."""


def check_base_state(state_dict: Mapping[str, Any], base: Optimizer) -> None:
    """Look at the part that the base optimizer loads, beyond the numbers of groups and parameters, which torch itself
    compares before it changes anything.

    Raises:
        ValueError: state of the wrong type, of a parameter that is not there, of another shape than the parameter's
            (torch's own optimizers), or not finite.
    """
    groups, states = state_dict["param_groups"], state_dict["state"]
    if not isinstance(groups, list) or not all(
        isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups
    ):
        raise ValueError(f"state_dict['param_groups']: expected a list of dicts with 'params', got {_describe(groups)}")
    if not isinstance(states, dict):
        raise ValueError(f"state_dict['state']: expected a dict, got {_describe(states)}")
    for i, group in enumerate(groups):
        bad = [k for k, v in group.items() if isinstance(v, float) and math.isnan(v)]
        if bad:
            raise ValueError(f"state_dict['param_groups'][{i}]['{bad[0]}']: expected a number, got nan")
    if _is_torchs(base) and len(groups) == len(base.param_groups):
        for i, (group, own) in enumerate(zip(groups, base.param_groups, strict=True)):
            odd = odd_setting(group, own)
            if odd:
                raise ValueError(f"state_dict['param_groups'][{i}]['{odd[0]}']: expected {odd[1]}, got "
                                 f"{_describe(group[odd[0]])}")  # fmt: skip
    keys, params = [key for group in groups for key in group["params"]], held_by(base)
    if not all(isinstance(key, int | str) for key in keys):
        raise ValueError("state_dict['param_groups']: expected numbers (or names) of parameters in 'params'")
    if len(keys) != len(params):
        return  # torch says so
    by_key = dict(zip(keys, params, strict=True))
    tensors = []
    for key, state in states.items():
        if key not in by_key:
            raise ValueError(f"state_dict['state'][{key!r}]: expected one of the parameters 0 to {len(keys) - 1}")
        if not isinstance(state, dict):
            raise ValueError(f"state_dict['state'][{key!r}]: expected a dict, got {_describe(state)}")
        tensors += list(_tensors(f"state_dict['state'][{key!r}]", state, by_key[key], _is_torchs(base)))
    for group in groups if _is_torchs(base) else ():
        found = odd_state(states, [(key, by_key[key]) for key in group["params"]], group)
        if found:
            raise ValueError(f"state_dict['state'][{found[0]!r}]: {found[1]}")
    _refuse_not_finite(tensors, infinite_too=_is_torchs(base))


def _is_torchs(base: Optimizer) -> bool:
    return type(base).__module__.startswith("torch.optim.")


def _tensors(field: str, state: Mapping[Any, Any], p: Tensor, torchs: bool) -> Iterator[tuple[str, Tensor]]:
    for name, value in state.items():
        fits = value is None or (isinstance(value, Tensor) and value.shape == p.shape)
        if torchs and name in OF_THE_PARAMETERS_SHAPE and not fits:
            raise ValueError(f"{field}['{name}']: expected a tensor of the parameter's shape {list(p.shape)}, got "
                             f"{_describe(value)}")  # fmt: skip
        if torchs and name == "step" and not _is_step(value):
            raise ValueError(f"{field}['step']: expected a number >= 0, got {_describe(value)}")
        if isinstance(value, Tensor) and value.is_floating_point():
            yield f"{field}['{name}']", value


def _is_step(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and (value.device.type != "cpu" or bool(value >= 0))
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _refuse_not_finite(tensors: Sequence[tuple[str, Tensor]], *, infinite_too: bool) -> None:
    """One look at each device."""
    odd: Callable[[Tensor], Tensor] = (lambda t: ~torch.isfinite(t)) if infinite_too else torch.isnan
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors:
        if tensor.device.type != "meta":
            by_device.setdefault(tensor.device, []).append((name, local(tensor)))
    for found in by_device.values():
        flags = torch.stack([odd(t).any() for _, t in found])
        bad = flags.nonzero().flatten().tolist()
        if bad:
            raise ValueError(f"{found[bad[0]][0]}: expected finite numbers, got {_describe(found[bad[0]][1])}")

"""Being a ``torch.optim.Optimizer`` while wrapping one: nothing of this is about several tasks."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from cost_mtl._torch.undo import all_or_nothing, commit, undo_on_failure
from cost_mtl.step.state_checks import check_base_state


def _restoring(base: Optimizer) -> Callable[[], None]:
    """What puts a base optimizer's state and groups back, which loading replaces."""
    state, entries = base.state, [(key, value, dict(value)) for key, value in base.state.items()]
    groups, settings = base.param_groups, [(group, dict(group)) for group in base.param_groups]

    def back() -> None:
        base.state, base.param_groups = state, groups
        state.clear()
        for key, entry, content in entries:
            entry.clear()
            entry.update(content)
            state[key] = entry
        groups[:] = [group for group, _ in settings]
        for group, content in settings:
            group.clear()
            group.update(content)

    return back


class OptimizerWrapper(Optimizer):
    """Delegates parameters, state and defaults to a base optimizer; there is one copy of each, the base's.

    ``Optimizer.__init__`` is not called, since it would make a second set; ``__setstate__({})`` of torch's class sets
    up its hook registries and wraps ``step`` for hooks and profiler (tests pin what is relied on).

    Args:
        base: the optimizer to wrap.

    Raises:
        TypeError: not an instance of ``torch.optim.Optimizer``.
        ValueError: LBFGS, which evaluates one scalar loss many times in its own step.
    """

    # GradScaler.step(optimizer, closure) then leaves its findings as attributes, and a wrong use can be told apart.
    _step_supports_amp_scaling = True

    _volatile = ("step", "grad_scale", "found_inf", "_opt_called", "_buffer", "_spare", "last_step", "_group",
                 "_first_step")  # fmt: skip
    """Attributes that are not copied: patched in by schedulers or scalers, buffers, handles."""

    def __init__(self, base: Optimizer) -> None:
        if inspect.isclass(base) or not isinstance(base, Optimizer):
            got = f"the class {base.__name__}" if inspect.isclass(base) else type(base).__name__
            raise TypeError(f"base: expected an instance of torch.optim.Optimizer, got {got}")
        if isinstance(base, torch.optim.LBFGS):
            raise ValueError("base: LBFGS is not supported: it calls its closure many times in one step and needs one "
                             "scalar loss, not one gradient per task")  # fmt: skip
        if isinstance(base, OptimizerWrapper):
            raise ValueError("base: is a COST already")
        self.base = base
        super().__setstate__({})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.base.param_groups = groups

    @property
    def state(self) -> Any:
        return self.base.state

    @state.setter
    def state(self, state: Any) -> None:
        self.base.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.base.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.base.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the base's."""
        self.base.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the base's. ``step`` overwrites ``.grad``, so it is not needed between steps."""
        self.base.zero_grad(set_to_none)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base!r})"

    def __getstate__(self) -> dict[str, Any]:
        # Hook registries stay behind, as they do for torch's own optimizers: hooks are often local functions.
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in self._volatile and not name.endswith(("_hooks", "_with_kwargs", "_always_called"))
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        super().__setstate__({})

    def _extra_state(self) -> dict[str, Any]:
        """What is saved beside the base's state."""
        raise NotImplementedError

    def _read_extra(self, extra: Any) -> Any:
        """Check what :meth:`_extra_state` gave (None: the checkpoint of a plain optimizer), change nothing."""
        raise NotImplementedError

    def _adopt_extra(self, extra: Any) -> None:
        """Take over what :meth:`_read_extra` returned."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The base's, plus ``"cost"``: a plain optimizer of the base's class can load it."""
        for hook in self._hooks("_optimizer_state_dict_pre_hooks"):
            hook(self)
        state = dict(self.base.state_dict()) | {"cost": self._extra_state()}
        for hook in self._hooks("_optimizer_state_dict_post_hooks"):
            changed = hook(self, state)
            state = state if changed is None else changed
        return state

    @all_or_nothing
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` made, or the state_dict of a plain optimizer (teleports then start anew).

        All of it is looked at before any is loaded; whatever fails, or interrupts, leaves both parts as they were.

        Raises:
            ValueError: it is neither, or damaged; the field is named.
        """
        missing = {"state", "param_groups"} - set(state_dict)
        if missing:
            raise ValueError(f"state_dict: expected what state_dict() of COST or of a torch optimizer made, got one "
                             f"without {sorted(missing)}")  # fmt: skip
        state = dict(state_dict)
        for hook in self._hooks("_optimizer_load_state_dict_pre_hooks"):
            changed = hook(self, state)
            state = state if changed is None else changed
        extra = self._read_extra(state.pop("cost", None))
        check_base_state(state, self.base)
        undo_on_failure(_restoring(self.base))
        self.base.load_state_dict(state)
        self._adopt_extra(extra)
        commit()
        for hook in self._hooks("_optimizer_load_state_dict_post_hooks"):
            hook(self)

    def _hooks(self, registry: str) -> list[Callable[..., Any]]:
        hooks: OrderedDict[int, Callable[..., Any]] = getattr(self, registry)
        return list(hooks.values())

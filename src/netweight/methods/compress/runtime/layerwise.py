"""Training layer by layer: each gradient is used up as soon as it exists, so only one layer is ever dense.

When a weight's gradient is complete, the weight is decoded into a shell, a torch optimizer steps that shell alone,
the weight is encoded again and the gradient freed. A large weight takes these steps tile by tile (`tiled_updates.py`).
The optimizer is a real one over all shells, so that groups, schedulers and state dicts work. After LOMO
(arXiv 2306.09782) and NeuZip (arXiv 2410.20650), section 3.2; there for plain SGD only.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, final, get_args

import torch
from torch import nn

from netweight.core import seeds
from netweight.errors import BadGradient, LayerwiseConflict, UsageError
from netweight.methods.compress.runtime import cuda as device
from netweight.methods.compress.runtime.gradient_parts import DensePart, GradientPart, GradientSum, is_zero
from netweight.methods.compress.runtime.incompatible import (
    reentrant,
    refuse_closures,
    refuse_parameters,
    refuse_reentrant_graph,
    refuse_unreduced_gradients,
    refuse_wrapped_model,
)
from netweight.methods.compress.runtime.tensor import CompressedTensor
from netweight.methods.compress.runtime.tiled_updates import STATE_LEVEL, States, StateTiles, copied, fit, tiled, tiles

_UPDATE, _MEASURE = "update", "measure"
# Smaller states, in bytes, are not compressed.
_SMALL_STATE = 1 << 12


class _Shell(nn.Parameter):
    """Stand-in for a weight in the torch optimizer: its shape and dtype, without memory between steps."""


@dataclass(eq=False)
class _Trained:
    """A parameter of the model, and where the torch optimizer has its shell."""

    parameter: nn.Parameter
    name: str
    group: int
    position: int


@dataclass(eq=False)
class _PendingGradient:
    """A complete gradient, which its device is looking at."""

    trained: _Trained
    gradient: torch.Tensor | GradientSum
    finite: Callable[[], bool]


def _empty(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _zero(dtype, parameter.device).expand(parameter.shape)


@cache
def _zero(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.zeros((), dtype=dtype, device=device)


@final
class LayerwiseOptimizer(torch.optim.Optimizer):
    """Step every parameter by any torch optimizer during the backward pass, as soon as its gradient is complete.

    N steps on a compressed model give bit for bit the weights, losses and optimizer state of N such steps on the
    dense model. Call `loss.backward()` once per batch; `step()` and `zero_grad()` may be called and do next to nothing.

    Args:
        model: Module with compressed or dense parameters, or both, those that train with `requires_grad`.
        optimizer_class: Any `torch.optim` class, or one like it, that can step parameters one by one.
        accumulation_steps: Backward passes per update. Until the last of them gradients are kept, dense, for all
            layers; the last pass uses them up layer by layer.
        last_pass: With accumulation, asked during a backward pass whether it is the last of its update, for loops whose
            updates are not all made of `accumulation_steps` passes; None counts.
        clip_norm: Largest norm of all gradients together, as in `torch.nn.utils.clip_grad_norm_`; None does not clip.
            Without accumulation two passes are made, one to measure and one to update: use `step(closure)`. Infinity
            makes two passes without clipping, so that a bad gradient is found before the first update.
        stochastic_rounding: Step bf16 weights in fp32 and round them stochastically; states are fp32 then.
        seed: Root seed of stochastic rounding.
        reduce: Called with each complete gradient before it is used, to reduce it over processes in place; see
            `average_gradient`. Needed in a process group of more than one.
        groups: Parameter groups as torch takes them: dicts with "params" and options; None puts all into one.
        states: How states of the optimizer, such as momenta, wait between steps: "dense"; "compressed", bit for bit,
            where they are; "offloaded", in the CPU's memory. Only the states of one weight, or of one tile of a large
            weight, are ever as the optimizer wants them. Steps are the same to the last bit.
        **options: Passed to `optimizer_class`, such as `lr`.

    Raises:
        LayerwiseConflict: The optimizer needs all gradients at once, another `LayerwiseOptimizer` has this model, or
            the model is wrapped for data parallel training or sharded. During a backward pass: gradients that nobody
            reduces, or clipping without its two passes; then nothing was updated. During a forward pass:
            reentrant checkpointing, which is also noticed later, during a backward pass that may have updated some
            layers.
        LossyWrite: A weight to be trained is kept rounded.
        BadGradient: During a backward pass: NaN or infinity. That parameter and those whose gradients would come later
            keep their values; the message says whether others were updated before. With `clip_norm` or accumulation
            with it, none was.
        UsageError: There is nothing to train, or an option is out of its range.

    Source: updates within the backward pass as LOMO makes them (arXiv 2306.09782).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        accumulation_steps: int = 1,
        last_pass: Callable[[], bool] | None = None,
        clip_norm: float | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        reduce: Callable[[torch.Tensor], None] | None = None,
        groups: Iterable[dict[str, Any]] | None = None,
        states: States = "dense",
        **options: Any,
    ) -> None:
        if states not in get_args(States):
            raise UsageError(
                f"states={states!r} is not supported.", cure=f"Choose one of {', '.join(get_args(States))}."
            )
        if accumulation_steps < 1:
            raise UsageError(
                f"accumulation_steps must be at least 1, not {accumulation_steps}.", cure="Choose 1 or more."
            )
        if last_pass is not None and accumulation_steps == 1:
            raise UsageError("last_pass was given, but accumulation_steps is 1.", cure="Give both, or neither.")
        if clip_norm is not None and not clip_norm > 0:
            raise UsageError(f"clip_norm is {clip_norm}.", cure="Choose a positive number, or None.")
        refuse_closures(optimizer_class)
        refuse_wrapped_model(model)
        names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not names:
            raise UsageError("No parameter of the model requires a gradient.", cure="Call requires_grad_() on some.")
        # Number of updates of the whole model.
        self.steps = 0
        # The norm of all gradients at the last update, if it was measured.
        self.grad_norm: torch.Tensor | None = None
        self._accumulation, self._clip, self._reduce = accumulation_steps, clip_norm, reduce
        self._last_pass, self._states = last_pass, states
        self._stochastic, self._seed = stochastic_rounding, seed
        chosen = [dict(group) for group in groups] if groups is not None else [{"params": list(names)}]
        ranks = {parameter: rank for rank, parameter in enumerate(names)}
        self._trained: list[_Trained] = []
        for index, group in enumerate(chosen):
            given: Any = group["params"]
            listed: list[Any] = [given] if isinstance(given, torch.Tensor) else list(given)
            members = [member for member in listed if member.requires_grad]
            for position, member in enumerate(members):
                if member not in names:
                    raise UsageError("A parameter in `groups` is not one of the model's, or is there twice.")
                self._trained.append(_Trained(member, names.pop(member), index, position))
            group["params"] = [_Shell(_empty(member, self._dtype_of(member))) for member in members]
        # In the model's order, in which `clip_grad_norm_` sums up norms, whatever the groups are.
        self._trained.sort(key=lambda each: ranks[each.parameter])
        self.inner = optimizer_class(chosen, **options)
        # Number of backward passes since the last update.
        self._micro = 0
        # The backward pass that is under way.
        self._pass: weakref.ref[_Pass] | None = None
        # Number of parameters updated in that pass.
        self._updated = 0
        # Function that ends the last write.
        self._ending: Callable[[], None] | None = None
        # The weight that is updated next.
        self._waiting: _PendingGradient | None = None
        self._mode = _UPDATE
        self._norms: dict[_Trained, torch.Tensor] = {}
        self._scale: torch.Tensor | None = None
        # Parts of gradients, by parameter, and torch's number of the backward pass that they are of.
        self._parts: dict[_Trained, list[tuple[int, GradientPart]]] = {}
        # What torch's Optimizer keeps besides groups and state; these two are the inner optimizer's.
        self._optimizer_step_pre_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_step_post_hooks: OrderedDict[int, Any] = OrderedDict()
        self._patch_step_function()
        refuse_parameters({each.name: each.parameter for each in self._trained})
        self._hooks = [_Hook(self, position) for position in range(len(self._trained))]
        self._handles = [
            each.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            for each, hook in zip(self._trained, self._hooks, strict=True)
        ]
        self._handles.append(model.register_forward_hook(_Watch(self)))

    # ---- what torch's schedulers and other libraries look at ----

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the torch optimizer, with shells as their parameters; schedulers change their options."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The torch optimizer's state, by shell."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The torch optimizer's default options."""
        return self.inner.defaults

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """The optimizer's state of one of the model's parameters, such as its momentum; empty before the first step.

        Args:
            parameter: One of the model's own.
        """
        trained = next(each for each in self._trained if each.parameter is parameter)
        return dict(self.inner.state.get(self._shell(trained), {}))

    def state_dict(self) -> dict[str, Any]:
        """The torch optimizer's state dict, and under "layerwise" the number of steps made.

        Raises:
            LayerwiseConflict: Gradients are being accumulated; they are not part of a state dict.
        """
        if self._micro:
            raise LayerwiseConflict(
                f"{self._micro} of {self._accumulation} backward passes of the next update are done.",
                cure="Save after an update, when `micro_step` is 0.",
            )
        return {**self.inner.state_dict(), "layerwise": {"steps": self.steps}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned; training continues as if it had not been interrupted."""
        inner = {key: value for key, value in state_dict.items() if key != "layerwise"}
        self.inner.load_state_dict(inner)
        self.steps = int(state_dict.get("layerwise", {}).get("steps", 0))
        self._micro = 0

    @property
    def micro_step(self) -> int:
        """Backward passes done since the last update; 0 when no gradient is waiting."""
        return self._micro

    @property
    def two_passes(self) -> bool:
        """True if an update takes two backward passes, and so `step(closure)`: with clipping, without accumulation."""
        return self._clip is not None and self._accumulation == 1

    @property
    def parameters_stepped(self) -> list[nn.Parameter]:
        """The model's own parameters, which the groups do not name; none after `close`."""
        return [] if self.closed else [each.parameter for each in self._trained]

    @property
    def closed(self) -> bool:
        """True if `close` was called."""
        return not self._handles

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure, which computes the loss and its gradients; without one there is nothing left to do.

        Args:
            closure: Computes the loss, calls its `backward()` and returns it. With `clip_norm` and no accumulation it
                is called twice with the same random numbers, first to measure the gradients' norm, then to update.

        Returns:
            What the closure returned, the first time.
        """
        if closure is None:
            return None
        with torch.enable_grad():
            if not self.two_passes:
                return closure()
            self._mode, self._norms = _MEASURE, {}
            try:
                with torch.random.fork_rng():
                    loss = closure()
                self._take_norm([self._norms[each] for each in self._trained if each in self._norms])
                self._mode = "scaled"
                closure()
            finally:
                self._mode, self._scale, self._norms = _UPDATE, None, {}
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Delete accumulated gradients; after an update, there are none.

        Args:
            set_to_none: As in torch; gradients are always dropped.
        """
        for each in self._trained:
            each.parameter.grad = None
        self._micro = 0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: groups are given when the optimizer is made.

        Args:
            param_group: Not looked at.

        Raises:
            LayerwiseConflict: Always.
        """
        raise LayerwiseConflict(
            "A LayerwiseOptimizer cannot take further groups.", cure="Close it, and create another one with `groups`."
        )

    def close(self) -> None:
        """Remove all hooks from the model, which then trains in the ordinary way."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # ---- during the forward and the backward pass ----

    def _forward_done(self, model: nn.Module, inputs: Any, output: Any) -> None:
        """Look at the graph of a forward pass, and at what runs it."""
        refuse_wrapped_model(model)
        if torch.is_grad_enabled():
            refuse_reentrant_graph(output)

    def _is_last(self) -> bool:
        """Return whether the backward pass at work is the last of its update."""
        return self._last_pass() if self._last_pass is not None else self._micro + 1 == self._accumulation

    def _begin(self) -> None:
        """Check a backward pass when its first gradient arrives, and register a callback for its end."""
        number = torch._C._current_graph_task_id()
        at_work = self._pass() if self._pass is not None else None
        if at_work is not None and at_work.number == number:
            return
        self._updated, self._waiting = 0, None
        if at_work is not None:
            raise reentrant()
        refuse_unreduced_gradients(self._reduce)
        if self.two_passes and self._mode == _UPDATE:
            raise LayerwiseConflict(
                "clip_norm needs the norm of all gradients before the first update, which takes two backward passes. "
                "Nothing was updated.",
                cure="Call optimizer.step(closure) with a closure that computes the loss and calls backward().",
            )
        at_work = _Pass(number, self._end)
        self._pass = weakref.ref(at_work)
        torch.autograd.Variable._execution_engine.queue_callback(at_work)

    @torch.no_grad()
    def _ready(self, trained: _Trained) -> None:
        """A parameter's gradient is complete for this backward pass."""
        try:
            self._begin()
            if self._mode == _MEASURE:
                self._norms[trained] = torch.linalg.vector_norm(self._checked(trained))
                trained.parameter.grad = None
            elif self.two_passes or (self._clip is None and self._is_last()):
                coming = self._look_at(trained)
                trained.parameter.grad = None
                self._update_waiting()
                self._waiting = coming
                # A GPU has examined the gradient by the time the next one is complete.
                if isinstance(coming.gradient, GradientSum) or not device.handles(coming.gradient):
                    self._update_waiting()
        except Exception:
            self._give_up()
            raise

    def _give_up(self) -> None:
        """Drop all gradients."""
        self._end_write()
        self.zero_grad()
        self._forget_parts()
        self._pass = self._waiting = None

    def _forget_parts(self) -> None:
        """Begin to count and collect parts of gradients anew."""
        self._parts.clear()
        for hook in self._hooks:
            hook.embeddings = 0

    def _takes_parts(self, trained: _Trained) -> bool:
        """Return whether a gradient may be collected by parts, since an update by tiles is all that happens to it."""
        whole = self._accumulation > 1 or self._clip is not None or self._reduce is not None
        return not (whole or self.closed) and trained.parameter.grad is None and fit(self.inner, trained.parameter)

    def _add_part(self, trained: _Trained, part: GradientPart) -> None:
        self._parts.setdefault(trained, []).append((torch._C._current_graph_task_id(), part))

    def _end_write(self) -> None:
        """Wait until the weight that was written last is whole."""
        ending, self._ending = self._ending, None
        if ending is not None:
            ending()

    @torch.no_grad()
    def _end(self) -> None:
        """The backward pass is over."""
        self._pass = None
        try:
            self._update_waiting()
        except Exception:
            self._give_up()
            raise
        self._end_write()
        self._forget_parts()
        if self._mode == _MEASURE:
            return
        last = self._is_last()
        self._micro += 1
        if not last:
            return
        # Gradients that wait for clipping, or that only earlier passes of this update gave.
        waiting = [each for each in self._trained if each.parameter.grad is not None]
        try:
            if self._clip is not None and not self.two_passes:
                self._take_norm([torch.linalg.vector_norm(self._checked(each)) for each in waiting])
            for each in waiting:
                checked = self._clip is not None and not self.two_passes
                gradient = each.parameter.grad if checked else self._checked(each)
                each.parameter.grad = None
                self._update(each, gradient)
        finally:
            self._end_write()
            self._scale = None
            self.zero_grad()
        self.steps += 1

    def _take_norm(self, norms: list[torch.Tensor]) -> None:
        """Find the factor that brings the norm of all gradients down to the limit, as `clip_grad_norm_` does."""
        assert self._clip is not None
        if not norms:
            return
        self.grad_norm = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
        self._scale = torch.clamp(self._clip / (self.grad_norm + 1e-6), max=1.0)

    def _look_at(self, trained: _Trained) -> _PendingGradient:
        """The complete gradient, reduced over processes, and how to find out whether it is finite."""
        gradient = trained.parameter.grad
        assert gradient is not None
        number = torch._C._current_graph_task_id()
        if parts := [part for of, part in self._parts.pop(trained, ()) if of == number]:
            if not gradient.is_sparse or gradient._nnz():
                parts.insert(0, DensePart(gradient.to_dense() if gradient.is_sparse else gradient))
            whole = GradientSum(parts)
            return _PendingGradient(trained, whole, whole.is_finite)
        if self._reduce is not None:
            self._reduce(gradient)
        return _PendingGradient(trained, gradient, _finiteness(gradient._values() if gradient.is_sparse else gradient))

    def _checked(self, trained: _Trained) -> torch.Tensor:
        """The same gradient, if it is finite."""
        gradient = self._if_finite(self._look_at(trained))
        assert isinstance(gradient, torch.Tensor), "gradients by parts are used at once"
        return gradient

    def _if_finite(self, waiting: _PendingGradient) -> torch.Tensor | GradientSum:
        if not waiting.finite():
            done = (
                f"{self._updated} other parameters were updated in this pass before, and it was not."
                if self._updated
                else "Nothing was updated."
            )
            raise BadGradient(
                f"The gradient of {waiting.trained.name} contains NaN or infinity. {done}",
                cure="Lower the learning rate, or inspect the batch; with clip_norm (also infinity) all gradients are "
                "examined before the first update.",
            )
        return waiting.gradient

    def _update_waiting(self) -> None:
        """Step the parameter whose gradient is waiting, if there is one."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._update(waiting.trained, self._if_finite(waiting))

    def _update(self, trained: _Trained, gradient: Any) -> None:
        """Step one parameter."""
        parameter = trained.parameter
        # The last weight was encoded meanwhile.
        self._end_write()
        if isinstance(gradient, GradientSum):
            self._update_by_tiles(trained, gradient)
            return
        if self._scale is not None:
            gradient.mul_(self._scale.to(gradient.device))
        if fit(self.inner, parameter, gradient):
            self._update_by_tiles(trained, GradientSum([DensePart(gradient)]))
            return
        dense = parameter.stored.taken() if isinstance(parameter, CompressedTensor) else parameter.detach()
        rounded = self._dtype_of(parameter) != dense.dtype
        shell = self._shell(trained)
        shell.data = dense.float() if rounded else dense
        shell.grad = gradient.float() if rounded else gradient
        try:
            self._step_alone(trained, shell)
            stepped = shell.detach()
            if rounded:
                stepped = _rounded(stepped, self._noise(trained, stepped.device))
            if isinstance(parameter, CompressedTensor):
                self._ending = parameter.stored.write_later(stepped)
                torch.autograd.graph.increment_version(parameter)
            elif rounded:
                parameter.copy_(stepped)
        finally:
            shell.grad = None
            shell.data = _empty(parameter, shell.dtype)
        self._updated += 1

    def _update_by_tiles(self, trained: _Trained, gradient: GradientSum) -> None:
        """Step one parameter, some numbers at a time, but for tiles that a step would leave as they are."""
        parameter, shell = trained.parameter, self._shell(trained)
        rounded = shell.dtype != parameter.dtype
        noise = self._noise(trained, parameter.device) if rounded else None
        states = StateTiles(self.inner.state.pop(shell, {}), parameter.shape, self._states, gradient)
        weight = tiled(parameter)
        idle: dict[str, Any] | None = None
        may_idle = not rounded and shell.dtype in _SHORT
        try:
            for first, last in tiles(parameter):
                state, numbers = states.read(first, last), gradient.numbers(first, last)
                if may_idle and numbers is None and _are_zero(state, last - first):
                    idle = self._idle_state(trained, shell, state, last - first) if idle is None else idle
                    may_idle = idle is not None
                    if idle is not None:
                        weight.keep(first, last)
                        states.keep(first, last, idle)
                        continue
                shell.data = weight.read(first, last).to(shell.dtype)
                shell.grad = torch.zeros_like(shell.data) if numbers is None else numbers.to(shell.dtype)
                if state:
                    self.inner.state[shell] = state
                self._step_only(trained, shell)
                states.write(first, last, self.inner.state.pop(shell, {}))
                stepped = shell.detach()
                weight.write(first, last, stepped if noise is None else _rounded(stepped, noise))
        finally:
            shell.grad = None
            shell.data = _empty(parameter, shell.dtype)
            weight.finish()
            state = states.finish()
            self.inner.state.pop(shell, None)
            if state:
                self.inner.state[shell] = state
            if isinstance(parameter, CompressedTensor):
                torch.autograd.graph.increment_version(parameter)
        self._updated += 1

    def _idle_state(
        self, trained: _Trained, shell: nn.Parameter, state: dict[str, Any], numbers: int
    ) -> dict[str, Any] | None:
        """The other states after a step, if it leaves every number as it is whose gradient and states are zero.

        That is so for most steps of bf16, in which a small weight decay is rounded away. It is found out by a step of
        all 65,536 numbers that there are. NaN is left out: a step makes NaN of it.
        """
        values = _short_values(shell.dtype)
        shell.data, shell.grad = values.clone(), torch.zeros_like(values)
        before = {
            name: value.new_zeros(len(values)) if _is_tile(value, numbers) else copied(value)
            for name, value in state.items()
        }
        if before:
            self.inner.state[shell] = before
        self._step_only(trained, shell)
        after = dict(self.inner.state.pop(shell, {}))
        of_tile = {name for name, value in after.items() if _is_tile(value, len(values))}
        same = torch.equal(shell.detach().view(torch.int16), values.view(torch.int16))
        if not same or after.keys() != state.keys() or not all(is_zero(after[name]) for name in of_tile):
            return None
        return {name: value for name, value in after.items() if name not in of_tile}

    def _step_alone(self, trained: _Trained, shell: nn.Parameter) -> None:
        """Step a single parameter as a whole, with its states as the torch optimizer wants them."""
        waiting: dict[str, Any] = dict(self.inner.state.get(shell, {}))
        if waiting:
            self.inner.state[shell].update({name: _as_used(value, shell.device) for name, value in waiting.items()})
        try:
            self._step_only(trained, shell)
        finally:
            states = self.inner.state.get(shell, {})
            # The states are processed one after the other.
            for name in states:
                states[name] = _as_kept(states[name], self._states, waiting.get(name))

    def _step_only(self, trained: _Trained, shell: nn.Parameter) -> None:
        """One step of the torch optimizer that sees a single parameter, or a tile of one."""
        groups = self.inner.param_groups
        group = groups[trained.group]
        everyone = group["params"]
        self.inner.param_groups, group["params"] = [group], [shell]
        try:
            self.inner.step()
        finally:
            self.inner.param_groups, group["params"] = groups, everyone

    def _noise(self, trained: _Trained, place: torch.device) -> torch.Generator:
        """The random numbers for rounding one parameter in this step."""
        return seeds.torch_generator(self._seed, trained.name, self.steps, device=str(place))

    def _shell(self, trained: _Trained) -> nn.Parameter:
        shell: nn.Parameter = self.inner.param_groups[trained.group]["params"][trained.position]
        return shell

    def _dtype_of(self, parameter: torch.Tensor) -> torch.dtype:
        return torch.float32 if self._stochastic and parameter.dtype == torch.bfloat16 else parameter.dtype


class _Pass:
    """A backward pass, called at its end; it lives until then, or until the pass fails, since the engine holds it."""

    def __init__(self, number: int, end: Callable[[], None]) -> None:
        self.number, self._end = number, end  # torch's number

    def __call__(self) -> None:
        self._end()


class _Watch:
    """Shows an optimizer the model's forward passes, and keeps it. A copy of the model is of no concern to it."""

    def __init__(self, optimizer: LayerwiseOptimizer | None) -> None:
        self.optimizer = optimizer

    def __call__(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if self.optimizer is not None:
            self.optimizer._forward_done(model, inputs, output)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Watch:
        return _Watch(None)


class _Hook:
    """Tells an optimizer that a gradient is complete. A class, so that another optimizer can recognize it."""

    # Torch shows Python's collector nothing of these hooks: held strongly, the parameters would never be freed. The
    # model's `_Watch` keeps the optimizer.

    def __init__(self, optimizer: LayerwiseOptimizer, position: int) -> None:
        self._optimizer, self._position = weakref.ref(optimizer), position
        self.embeddings = 0

    def takes_parts(self) -> bool:
        """Return whether an update by tiles follows as soon as the gradient is complete."""
        optimizer = self._optimizer()
        return optimizer is not None and optimizer._takes_parts(optimizer._trained[self._position])

    def add(self, part: GradientPart) -> None:
        """Add a part of the gradient, in a backward pass."""
        optimizer = self._optimizer()
        assert optimizer is not None
        optimizer._add_part(optimizer._trained[self._position], part)

    @property
    def optimizer(self) -> LayerwiseOptimizer | None:
        """The optimizer, while there is one."""
        return self._optimizer()

    def __call__(self, parameter: torch.Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer._ready(optimizer._trained[self._position])


_SHORT = (torch.bfloat16, torch.float16)


@cache
def _short_values(dtype: torch.dtype) -> torch.Tensor:
    """Every number of a dtype of 16 bits but NaN."""
    with torch.inference_mode(False):
        values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
        return values[~values.isnan()]


def _is_tile(value: Any, numbers: int) -> bool:
    """Return whether a state has a number for each of a tile, rather than one for all."""
    return isinstance(value, torch.Tensor) and value.shape == (numbers,)


def _are_zero(state: dict[str, Any], numbers: int) -> bool:
    """Return whether all states of a tile are zero."""
    return all(is_zero(value) for value in state.values() if _is_tile(value, numbers))


def _as_used(state: Any, on: torch.device) -> Any:
    """A state as the optimizer wants it, dense and where its weight is."""
    # Counts of steps stay on the device on which the optimizer put them.
    if isinstance(state, torch.Tensor) and state.dim():
        return (state.dense() if isinstance(state, CompressedTensor) else state).to(on)
    return state


def _as_kept(state: Any, how: States, before: Any) -> Any:
    """A state as it waits for the next step, in the memory in which it waited before if that is compressed."""
    if how == "dense" or not isinstance(state, torch.Tensor) or state.nbytes < _SMALL_STATE:
        return state
    if how == "offloaded":
        return state.cpu()
    if isinstance(before, CompressedTensor) and before.shape == state.shape and before.dtype == state.dtype:
        before.stored.write(state)
        return before
    compressed = CompressedTensor.of(state, level=STATE_LEVEL)
    return compressed if compressed.payload.nbytes < state.nbytes else state


def average_gradient(gradient: torch.Tensor) -> None:
    """Average a gradient over all processes of the default group, in place: `LayerwiseOptimizer(..., reduce=this)`.

    It is scaled first and then summed, as `DistributedDataParallel` does: two processes train to the same bits as with
    that. With more, the order of a sum may depend on how gradients are put together.

    Args:
        gradient: A dense gradient; every process must train the same parameters in the same order.
    """
    gradient.mul_(1.0 / torch.distributed.get_world_size())
    torch.distributed.all_reduce(gradient)


def round_stochastically(values: torch.Tensor, seed: int, *path: str | int) -> torch.Tensor:
    """Round fp32 to bf16, up or down at random so that the expected value is the exact one."""
    return _rounded(values, seeds.torch_generator(seed, *path, device=str(values.device)))


def _rounded(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    bits = values.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=values.device, generator=generator)
    rounded = noise.add_(bits).bitwise_and_(-(1 << 16)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def _finiteness(values: torch.Tensor) -> Callable[[], bool]:
    """Return whether every number is finite, mostly found out by adding them up, which takes a fraction of the time."""
    total = device.PendingNumber(values.sum())
    # Finite numbers may add up to infinity, so only an infinite total needs a closer check.
    return lambda: math.isfinite(total()) or bool(torch.isfinite(values).all())

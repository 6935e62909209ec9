"""Where the memory of a training step goes: counted tensor by tensor, and as the system sees the process.

`TensorLedger` counts the bytes of all tensors as they come and go, and says what they were for when they were most:
weights, gradients, optimizer states, activations. `PrivateMemory` samples what the process holds in memory of its own,
which includes what is not a tensor. `in_fresh_process` runs such a measurement where nothing was before.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from netweight.errors import NetweightError, UsageError

PARTS = ("weights", "gradients", "optimizer state", "activations", "decoded weights", "other")
"""What bytes are for; `TensorLedger` says how it tells them apart."""

_STATUS = Path("/proc/self/status")
_EVERY = 0.0005  # seconds between two looks at the process


@dataclass(frozen=True)
class Peak:
    """The moment at which most bytes were held."""

    nbytes: int
    """All of them."""
    parts: Mapping[str, int]
    """How many for each of `PARTS`; they add up to `nbytes`."""


class TensorLedger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of every storage from its first appearance until it is freed: `with ledger: step()`."""

    # Each operator's inputs and results are seen, those inside a compressed parameter too. Bytes that are no
    # tensors, such as an encoder's work space, are not seen; nor are tensors on the meta device. At every new
    # peak each storage is put under the first of these that holds:
    # - weights: parameters and buffers of the model, compressed ones with their payload;
    # - gradients: `.grad` of a parameter;
    # - optimizer state: tensors in the optimizer's `state`;
    # - decoded weights: made by netweight's decoding operators;
    # - activations: made in a forward pass, or in the part of a backward pass that checkpointing calculates again;
    # - other: all else, such as gradients of activations, and gradients of weights before they arrive in `.grad`.

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model, self._optimizer = model, optimizer
        self._now = 0
        self._within = 0  # calls of modules at work
        self._hooks: list[Any] = []
        self._peak = Peak(0, dict.fromkeys(PARTS, 0))
        self._live: dict[int, tuple[int, str, Any]] = {}  # by storage: bytes, what it was made for, weak reference
        for tensor in self._held()[0]:
            self._see(tensor, "other")
        for tensor in self._held()[2]:
            self._see(tensor, "other")

    def __enter__(self) -> Self:
        """Begin to count."""

        def enter(*_: Any) -> None:
            self._within += 1

        def leave(*_: Any) -> None:
            self._within -= 1

        hooks = torch.nn.modules.module
        self._hooks = [
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(leave, always_call=True),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *details: object) -> None:
        """Stop."""
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*details)  # type: ignore[no-untyped-call]

    @property
    def peak(self) -> Peak:
        """The peak so far."""
        return self._peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and see what it took and what it made."""
        if any(kind is not torch.Tensor and hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the parameter's own dispatch comes first, so that what it allocates is seen
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf, "other")
        result = func(*args, **(kwargs or {}))
        purpose = None
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                purpose = purpose or self._purpose(func)
                self._see(leaf, purpose)
        return result

    def _purpose(self, func: Any) -> str:
        """What an operator's results are for, by where it runs."""
        if func.namespace == "netweight" and "decode" in func._schema.name:
            return "decoded weights"
        # In a backward pass only what checkpoints calculate again has gradients on, or runs in a module; within a
        # Function's forward they are off.
        return "activations" if torch.is_grad_enabled() or self._within else "other"

    def _see(self, tensor: torch.Tensor, purpose: str) -> None:
        for storage in _storages(tensor):
            key, size = storage._cdata, storage.nbytes()
            if key in self._live:
                continue
            self._live[key] = (size, purpose, weakref.ref(storage, partial(self._freed, key)))
            self._now += size
            if self._now > self._peak.nbytes:
                self._peak = Peak(self._now, self._parts())

    def _freed(self, key: int, reference: Any) -> None:
        self._now -= self._live.pop(key)[0]

    def _parts(self) -> dict[str, int]:
        """What the bytes that are held at this moment are for."""
        known: dict[int, str] = {}
        for part, tensors in zip(PARTS, self._held(), strict=False):
            for tensor in tensors:
                for storage in _storages(tensor):
                    known.setdefault(storage._cdata, part)
        parts = dict.fromkeys(PARTS, 0)
        for key, (size, purpose, _) in self._live.items():
            parts[known.get(key, purpose)] += size
        return parts

    def _held(self) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Weights, gradients and optimizer states as they are now."""
        parameters = list(self._model.parameters())
        weights = [*parameters, *self._model.buffers()]
        states: list[torch.Tensor] = []
        if self._optimizer is not None:
            # A layer by layer optimizer steps stand-ins of parameters, which have gradients of their own.
            parameters += [p for group in self._optimizer.param_groups for p in group["params"]]
            states = [leaf for leaf in tree_leaves(list(self._optimizer.state.values())) if torch.is_tensor(leaf)]
        return weights, [p.grad for p in parameters if p.grad is not None], states


def _storages(tensor: torch.Tensor) -> Iterable[Any]:
    """The storages of a tensor; of a wrapper, those of the tensors within."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _storages(getattr(tensor, name))
    elif tensor.is_sparse:
        yield from (tensor._indices().untyped_storage(), tensor._values().untyped_storage())
    elif not tensor.is_meta:
        yield tensor.untyped_storage()


def private_bytes() -> int:
    """Bytes of memory that this process has for itself alone (RssAnon)."""
    if not _STATUS.is_file():
        raise UsageError("This system does not say what memory a process holds.", cure="Measure on Linux.")
    found = next(line for line in _STATUS.read_text().splitlines() if line.startswith("RssAnon"))
    return int(found.split()[1]) * 1024


class PrivateMemory:
    """Samples the private memory of the process twice a millisecond, in a thread; `highest` is the peak in bytes."""

    def __init__(self) -> None:
        self.highest = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        """Start to look."""
        gc.collect()
        self.highest = private_bytes()
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        """Stop."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_EVERY):
            self.highest = max(self.highest, private_bytes())


def in_fresh_process(function: Callable[[Any], Any], argument: Any, *, threads: int = 1) -> Any:
    """Run a function in a new Python process, whose memory nothing has used before."""
    # Large blocks of memory go back to the system there as soon as they are freed (with glibc), so that what is
    # sampled is what is held.
    name = f"{function.__module__}:{function.__qualname__}"
    if function.__module__ == "__main__" or "<" in function.__qualname__:
        raise UsageError(f"{name} cannot be imported.", cure="Define it at the top level of a module.")
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": str(threads)}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-W", "ignore", "-m", __name__, name, json.dumps(argument)]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True)
    if answer.returncode:
        died = f"was killed by signal {-answer.returncode}" if answer.returncode < 0 else "failed"
        last = answer.stderr.strip().splitlines()[-1:] or ["It said nothing."]
        raise NetweightError(f"The process that ran {name} {died}: {last[0]}", cure="Is there enough memory?")
    return json.loads(answer.stdout.splitlines()[-1])


def _main(name: str, argument: str) -> None:
    module, function = name.split(":")
    print(json.dumps(getattr(importlib.import_module(module), function)(json.loads(argument))), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])

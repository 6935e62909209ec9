"""State that a network keeps and random numbers that it draws in training, found by running a copy of it."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from netweight.errors import Unsupported, UsageError


@final
@dataclass(frozen=True)
class Habits:
    """Side effects of a network in training mode."""

    random: bool = False
    """True if the network draws random numbers, as dropout does."""
    needs_two: bool = False
    """True if the network cannot be trained on a batch of one example, as with batch normalization of features."""
    from_data: tuple[str, ...] = ()
    """Buffers whose new values depend on the examples of a batch, as running statistics do."""
    mixes: frozenset[tuple[bool, bool]] = frozenset()
    """When the outputs for an example depend on the other examples of its batch: pairs of whether the body is in
    training mode, and whether the head is. Batch normalization depends on them in training mode only.
    """


def refuse_shared_weights(body: nn.Module, head: nn.Module) -> None:
    """Refuse halves of which one layer's trained weight is the other's too.

    Args:
        body: The feature extractor.
        head: The classifier.

    Raises:
        UsageError: A trained weight lies in memory that both halves use: they would be trained as two weights.
    """
    for half in (body, head):
        refuse_unfit_network(half)
    owners = {
        value.untyped_storage().data_ptr(): name for name, value in body.named_parameters() if value.requires_grad
    }
    for name, value in head.named_parameters():
        place = value.untyped_storage().data_ptr()
        if value.requires_grad and value.numel() and place in owners:
            raise UsageError(
                f"The body's weight {owners[place]!r} and the head's weight {name!r} are one and the same; "
                "each half is trained, sent and kept on its own, so that they would become two.",
                cure="Put both layers into the same half, or give each a weight of its own.",
            )


def refuse_unfit_network(module: nn.Module) -> None:
    """Refuse a network that cannot be trained by clients, before anything is computed.

    Args:
        module: The network, or one half of it.

    Raises:
        UsageError: A lazy layer has no weights yet, or a weight has no values, or is NaN, infinite or complex.
        Unsupported: A module is compiled by `torch.jit`, or wrapped by DataParallel, so that its weights cannot be
            exchanged; the trained weights have several types; or an embedding changes its weights in its forward, or
            has sparse gradients, or gradients that mix the examples of a batch.
    """
    for name, value in module.named_parameters():
        if isinstance(value, nn.UninitializedParameter):
            raise UsageError(
                f"The weight {name!r} belongs to a lazy layer and has no shape yet.",
                cure="Run the network once on an example before it is federated.",
            )
        if value.is_meta:
            raise UsageError(
                f"The weight {name!r} is on the device meta, where tensors have no values.",
                cure="Make the network on the CPU, outside of torch.device('meta') and init_empty_weights.",
            )
        if value.is_complex():
            raise UsageError(
                f"The weight {name!r} is complex ({value.dtype}); updates are compared, clipped and averaged as real "
                "numbers.",
                cure="Keep real and imaginary part as two weights, and join them in forward with torch.complex.",
            )
        if not bool(value.isfinite().all()):
            raise UsageError(f"The weight {name!r} contains NaN or infinity.", cure="Initialize it with numbers.")
    kinds = sorted({str(value.dtype).removeprefix("torch.") for value in module.parameters() if value.requires_grad})
    if len(kinds) > 1:
        raise Unsupported(
            f"The weights of {type(module).__name__} that are to be trained have several types ({', '.join(kinds)}); "
            "the weights of a half are sent and averaged as one vector.",
            cure="Convert them to one type (such as module.float()), or call requires_grad_(False) on the others.",
        )
    for name, each in module.named_modules():
        if isinstance(each, nn.Embedding | nn.EmbeddingBag):
            _refuse_embedding(name or type(each).__name__, each)
        if isinstance(each, nn.DataParallel | nn.parallel.DistributedDataParallel):
            kind = type(each).__name__
            raise Unsupported(
                f"The network contains a module that {kind} wraps, which copies weights between devices by itself.",
                cure=f"Return the module inside: the attribute `module` of the {kind}.",
            )
    if any(isinstance(each, torch.jit.ScriptModule) for each in module.modules()):
        raise Unsupported(
            f"{type(module).__name__} is compiled by torch.jit: each client needs the same network with weights of its "
            "own.",
            cure="Return the module from before torch.jit.script or torch.jit.trace.",
        )


def _refuse_embedding(name: str, layer: nn.Embedding | nn.EmbeddingBag) -> None:
    """Refuse an embedding whose forward changes its weights, or whose gradients cannot be averaged."""
    if layer.max_norm is not None:
        raise Unsupported(
            f"The layer {name!r} has max_norm={layer.max_norm}: its forward changes its own weights, which clients "
            "share.",
            cure="Leave max_norm out, and normalize the vectors in forward.",
        )
    if layer.sparse and layer.weight.requires_grad:
        raise Unsupported(
            f"The layer {name!r} has sparse gradients, which updates cannot contain.",
            cure="Make it with sparse=False, which gives the same values.",
        )
    if layer.scale_grad_by_freq and layer.weight.requires_grad:
        raise Unsupported(
            f"The layer {name!r} has scale_grad_by_freq=True: the gradient of an example depends on the other examples "
            "of its batch.",
            cure="Leave scale_grad_by_freq out.",
        )


def copied(module: nn.Module) -> nn.Module:
    """Return a copy of a network.

    Args:
        module: The network, or one half of it.

    Raises:
        Unsupported: It holds tensors that are computed from others, as the old `torch.nn.utils.weight_norm` makes them.
    """
    try:
        return copy.deepcopy(module)
    except RuntimeError as error:
        raise Unsupported(
            f"{type(module).__name__} cannot be copied: {str(error).strip().splitlines()[0]}",
            cure="Use torch.nn.utils.parametrizations (weight_norm, spectral_norm) in place of the functions of "
            "torch.nn.utils, and make pruning permanent (torch.nn.utils.prune.remove).",
        ) from error


def habits_of(body: nn.Module, head: nn.Module, inputs: Tensor) -> Habits:
    """Return what a network does in training mode, after refusing state that no client could own.

    Args:
        body: The feature extractor.
        head: The classifier.
        inputs: A few inputs, shape `(n, …)`.

    Raises:
        UsageError: The network cannot take such inputs.
        Unsupported: The network keeps something between batches that is not a registered buffer, or draws random
            numbers that are not those of torch.
    """
    first = inputs if len(inputs) > 1 else torch.cat([inputs, inputs])
    second = first.flip(0) * 0.5 if first.is_floating_point() else first.flip(0)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        _refuse_foreign_numbers(nn.ModuleList([copied(body), copied(head)]).train(), first)
        one, fresh, other = (nn.ModuleList([copied(body), copied(head)]).train() for _ in range(3))
        before = _kept(one)
        draws = _run(one, first)[1]
        after = _kept(one)
        _run(other, second)
        # A network that begins with the same buffers, and nothing else of what it kept, has to go on in the same way.
        owned = _owned_buffers(one)
        for name, value in _owned_buffers(fresh).items():
            value.copy_(owned[name])
        from_data = tuple(
            _named(name) for name, value in _owned_buffers(other).items() if not _same(value, owned[name])
        )
        if not _same(_run(one, second)[0], _run(fresh, second)[0]):
            changed = [
                n for n, v in after.items() if (n not in owned or n not in before) and not _same(before.get(n), v)
            ]
            raise _shared_by_clients(_named(changed[0]) if changed else "something")
        mixes = frozenset(
            mode for mode in _TRAINING
            # Networks that draw random numbers draw others for another batch, so they are tried outside of training.
            if _mixes(body, head, first[:1], second, mode if not draws else (False, False))
        )  # fmt: skip
    return Habits(draws, _needs_two(body, head, inputs), from_data, mixes)


def _refuse_foreign_numbers(halves: nn.ModuleList, inputs: Tensor) -> None:
    """Refuse random numbers that are not those of torch, and numbers that change whenever a layer runs.

    Such a number may act only after many batches, as a warm-up does, which no trial would show.
    """
    process = random.getstate(), np.random.get_state(legacy=False)
    generator = next((name for name, value in _numbers(halves) if isinstance(value, torch.Generator)), None)
    kept = []
    for _ in range(2):
        _run(halves, inputs)
        kept.append({name: value for name, value in _numbers(halves) if isinstance(value, int | float)})
    drawn = str(process) != str((random.getstate(), np.random.get_state(legacy=False)))
    if generator is not None or drawn:
        source = f"from a generator of its own, {_named(generator)!r}" if generator else "by Python or NumPy"
        raise Unsupported(
            f"The network draws random numbers {source}: all clients of this process would share it, and no run could "
            "be repeated.",
            cure="Draw them by torch, without a generator.",
        )
    counted = next((name for name, value in kept[1].items() if not _same(value, kept[0].get(name))), None)
    if counted is not None:
        raise _shared_by_clients(_named(counted))


def _shared_by_clients(name: str) -> Unsupported:
    return Unsupported(
        f"The network keeps {name!r} from batch to batch. This is not a registered buffer of a trained layer, so all "
        "clients of this process would share it.",
        cure="Register it as a buffer with its initial value (`register_buffer`), or leave it out.",
    )


def _numbers(halves: nn.ModuleList) -> Iterator[tuple[str, Any]]:
    """Yield what the layers keep beside tensors and modules, by name."""
    for path, module in halves.named_modules():
        for name, value in vars(module).items():
            if name not in _TORCHS_OWN:
                yield f"{path}.{name}", value


def _owned_buffers(halves: nn.ModuleList) -> dict[str, Tensor]:
    """Return the buffers of layers in training mode, which clients own."""
    return {
        f"{path}.{name}": value
        for path, module in halves.named_modules()
        if module.training
        for name, value in module.named_buffers(recurse=False)
    }


def _run(halves: nn.ModuleList, inputs: Tensor) -> tuple[Tensor, bool]:
    """Return the outputs, and whether random numbers were drawn; every run draws the same ones."""
    torch.manual_seed(0)
    begun = torch.get_rng_state()
    try:
        outputs = halves[1](halves[0](inputs))
    # The network of a user may raise anything.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        raise UsageError(
            f"The network cannot take inputs of shape {tuple(inputs.shape)}: {type(error).__name__}: {reason}.",
            cure="Give a network that was made for this data.",
        ) from error
    return outputs, not torch.equal(begun, torch.get_rng_state())


# Body and head in training mode, or one of them.
_TRAINING = ((True, True), (True, False), (False, True))


def _mixes(body: nn.Module, head: nn.Module, one: Tensor, others: Tensor, mode: tuple[bool, bool]) -> bool:
    """Return whether the outputs for one example change with the others of its batch."""
    halves, again = (
        nn.ModuleList([copied(body).train(mode[0]), copied(head).train(mode[1])]) for _ in range(2)
    )  # fmt: skip
    together, drawn = _run(halves, torch.cat([one, others]))
    if drawn:
        return False
    try:
        alone = _run(again, one)[0]
    except UsageError:
        # A layer that normalizes over the batch refuses a single example.
        return True
    return not torch.allclose(together[:1].float(), alone.float(), rtol=1e-2, atol=1e-3)


def _needs_two(body: nn.Module, head: nn.Module, inputs: Tensor) -> bool:
    halves = nn.ModuleList([copied(body), copied(head)]).train()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            halves[1](halves[0](inputs[:1]))
        except ValueError:
            return True
    return False


def _kept(halves: nn.ModuleList) -> dict[str, Any]:
    """Return copies of all buffers, tensors and numbers that the layers keep beside their parameters."""
    state: dict[str, Any] = {name: value.clone() for name, value in halves.named_buffers()}
    for name, value in _numbers(halves):
        if isinstance(value, Tensor):
            state[name] = value.detach().clone()
        elif isinstance(value, int | float):
            state[name] = value
    return state


_TORCHS_OWN = frozenset(vars(nn.Module()))


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return one.shape == two.shape and torch.equal(one, two)
    return bool(one == two) if not isinstance(one, Tensor) and not isinstance(two, Tensor) else False


def _named(name: str) -> str:
    """Return a name of the pair of halves as `body.NAME` or `head.NAME`."""
    half, _, rest = name.partition(".")
    return f"{'body' if half == '0' else 'head'}.{rest}" if half in ("0", "1") else name

"""Names of the targets of an adapter: modules, the experts of a packed parameter, and embeddings.

model.layers.0.self_attn.q_proj              the weight of a linear layer or convolution
model.layers.0.mlp.experts.gate_up_proj[3/8]  expert 3 of the 8 that one parameter holds (peft's `target_parameters`)
model.layers.0.mlp.gate.weight[0/1]           a matrix of a module that is not a linear layer, such as a router
model.embed_tokens[embedding]                 an embedding, whose rows are tokens

peft writes the adapter of a packed parameter as one pair of factors per parameter, on the module that owns it. Where
a module owns several such parameters, their adapters are nested, the last one outermost.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from netweight.errors import CorruptBlob, UsageError

if TYPE_CHECKING:
    from netweight.nn.lora import LowRank

EMBEDDING = "[embedding]"
"""Behind the name of an embedding layer."""
NESTED = ".base_layer"
"""Behind the name of a module whose outer adapter is of another parameter."""
_EXPERT = re.compile(r"(?P<parameter>.+)\[(?P<number>\d+)/(?P<count>\d+)\]")
# In which order the modules of transformers declare their packed parameters.
_ORDER = (
    "w1", "v1", "w2", "gate_proj", "up_proj", "gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias",
)  # fmt: skip


def expert_name(parameter: str, number: int, count: int) -> str:
    """The name of one expert of a packed parameter."""
    return f"{parameter}[{number}/{count}]"


def expert_of(name: str) -> tuple[str, int, int] | None:
    """Parameter, number of the expert, and number of all experts; None for other names."""
    match = _EXPERT.fullmatch(name)
    return None if match is None else (match["parameter"], int(match["number"]), int(match["count"]))


def parameter_of(name: str) -> str:
    """The model's parameter that an adapter's name changes, or changes a part of."""
    expert = expert_of(name)
    return expert[0] if expert else f"{name.removesuffix(EMBEDDING)}.weight"


def module_of(name: str) -> str:
    """The model's module that owns what an adapter's name changes."""
    return parameter_of(name).rpartition(".")[0]


def targeted(written: str, patterns: Iterable[str]) -> tuple[str, int, tuple[str, ...]] | None:
    """Find the packed parameters that a module's adapter in a file of peft may be of.

    Args:
        written: The module as the file writes it, without peft's prefix; `.base_layer` is behind nested ones.
        patterns: peft's `target_parameters`: names of parameters, or their ends.

    Returns:
        The module without `.base_layer`, how deep it is nested, and the parameters that it owns, sorted; None if the
        patterns name none of its parameters.
    """
    module, depth = written, 0
    while module.endswith(NESTED):
        module, depth = module.removesuffix(NESTED), depth + 1
    own = set()
    for pattern in patterns:
        owner, _, parameter = pattern.rpartition(".")
        if owner in ("", module) or module.endswith(f".{owner}"):
            own.add(f"{module}.{parameter}")
    return (module, depth, tuple(sorted(own))) if own else None


def in_order(parameters: Sequence[str], model: Sequence[str] | None, where: Path) -> list[str]:
    """Bring the packed parameters of one module to the order in which the module declares them.

    Args:
        parameters: Full names of parameters.
        model: All parameters of the model in their order, if it is at hand.
        where: The adapter, for messages.

    Raises:
        UsageError: The order is not known, and it decides which factors are whose.
    """
    if len(parameters) == 1:
        return list(parameters)
    if model is not None:
        places = {name: place for place, name in enumerate(model)}
        ends = {name: next((each for each in places if each == name or each.endswith(f".{name}")), None)
                for name in parameters}  # fmt: skip
        if all(ends.values()):
            return sorted(parameters, key=lambda name: places[str(ends[name])])
    lasts = {name: name.rpartition(".")[2] for name in parameters}
    if all(last in _ORDER for last in lasts.values()):
        return sorted(parameters, key=lambda name: _ORDER.index(lasts[name]))
    raise UsageError(
        f"{where} changes {', '.join(parameters)}, whose adapters are nested in the order of the model's parameters, "
        "and that order is not known.",
        cure="Name the folder of the base model (--model FOLDER).",
    )


def nested_names(parameters: Sequence[str]) -> dict[str, str]:
    """Parameter → the module as peft names it in a file, for the packed parameters of one module in their order."""
    last = len(parameters) - 1
    return {name: name.rpartition(".")[0] + NESTED * (last - place) for place, name in enumerate(parameters)}


def experts_joined(changes: Mapping[str, LowRank]) -> dict[str, tuple[LowRank, int]]:
    """Put the experts of each packed parameter together as peft does: `down` by experts, `up` by ranks.

    Args:
        changes: Expert's name → its change. An expert that is missing stays as it is.

    Returns:
        Parameter → factors of shapes `(count · rank, columns)` and `(rows, rank · count)`, and the rank of one expert:
        the highest of all, where lower ones are filled up with zeros.
    """
    import torch

    from netweight.nn.lora import LowRank
    from netweight.store.lora_formats.scales import scaled_up

    groups: dict[str, dict[int, LowRank]] = {}
    counts: dict[str, int] = {}
    for name, change in changes.items():
        expert = expert_of(name)
        # The caller chose names of experts.
        assert expert is not None
        parameter, number, count = expert
        groups.setdefault(parameter, {})[number] = change
        if counts.setdefault(parameter, count) != count or number >= count:
            raise CorruptBlob(f"{name} and other experts of {parameter} do not belong to one model.")
    joined = {}
    for parameter, experts in groups.items():
        first = next(iter(experts.values()))
        one_scale = all(each.scale == first.scale for each in experts.values())
        scale = first.scale if one_scale else 1.0
        ups = {number: each.up if one_scale else scaled_up(each.up, each.scale) for number, each in experts.items()}
        dtype = first.down.dtype
        for each in (*ups.values(), *(one.down for one in experts.values())):
            dtype = torch.promote_types(dtype, each.dtype)
        rank, count = max(each.rank for each in experts.values()), counts[parameter]
        down = torch.zeros(count, rank, first.shape[1], dtype=dtype)
        up = torch.zeros(first.shape[0], rank, count, dtype=dtype)
        for number, one in experts.items():
            down[number, : one.rank] = one.down.to(dtype)
            up[:, : one.rank, number] = ups[number].to(dtype)
        joined[parameter] = LowRank(down.flatten(0, 1), up.flatten(1), scale), rank
    return joined

"""A hypernetwork that stays with the server, and its steps of SGD. pFedHN calls it.

The server's state holds all of it as plain tensors: the hypernetwork, every client's embedding, the momentum of both,
the clients' numbers, and where each generated tensor lies in the generated vector.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from netweight.errors import NameNotFound
from netweight.generate import Hypernetwork, ParameterLayout
from netweight.methods.federate.updates import Tensors

__all__ = ["EMBEDDINGS", "ServerDescent", "ServerHypernetwork", "first_state"]

EMBEDDINGS = "embeddings"
_CLIENTS, _LAYOUT, _VELOCITY = "clients", "layout.", "velocity."
_WEIGHT, _BIAS, _TRUNK = "heads.weight", "heads.bias", "trunk."


def first_state(
    network: Hypernetwork, embeddings: Tensor, clients: tuple[int, ...], layout: ParameterLayout
) -> dict[str, Tensor]:
    """Return the server's state before the first round.

    Args:
        network: The hypernetwork.
        embeddings: One per client, shape `(N, E)`.
        clients: The clients' numbers, in the order of the embeddings.
        layout: Names and shapes of what is generated.
    """
    learned = {name: value.detach().clone() for name, value in network.named_parameters()} | {EMBEDDINGS: embeddings}
    starts = [sum(layout.sizes[:position]) for position in range(len(layout.names))]
    places = {
        _LAYOUT + name: torch.tensor([start, *shape])
        for name, start, shape in zip(layout.names, starts, layout.shapes, strict=True)
    }
    velocity = {_VELOCITY + name: torch.zeros_like(value) for name, value in learned.items()}
    return learned | velocity | places | {_CLIENTS: torch.tensor(clients)}


@final
@dataclass(frozen=True)
class ServerDescent:
    """SGD of the server's.

    Attributes:
        lr: Learning rate.
        momentum: Momentum.
        weight_decay: Weight decay.
        clip: Largest norm of a step's whole gradient.
    """

    lr: float
    momentum: float
    weight_decay: float
    clip: float


@final
class ServerHypernetwork:
    """The server's state at work.

    Args:
        state: Tensors by name, as `first_state` returns them or `state` returned them; they are not changed.
    """

    def __init__(self, state: Tensors) -> None:
        self._state = dict(state)
        self._rows = {int(number): row for row, number in enumerate(state[_CLIENTS].tolist())}
        self._learned = [name.removeprefix(_VELOCITY) for name in state if name.startswith(_VELOCITY)]

    @property
    def state(self) -> dict[str, Tensor]:
        """The state as it is now."""
        return self._state

    @torch.no_grad()
    def generate(self, client: int) -> dict[str, Tensor]:
        """Return a client's tensors by name.

        Args:
            client: Its number.

        Raises:
            NameNotFound: There is no such client.
        """
        codes = self._codes(self._embedding(client), self._trunk())
        return self._named(torch.addmv(self._state[_BIAS], self._state[_WEIGHT], codes))

    def step(self, gradients: Mapping[int, Mapping[str, Tensor]], descent: ServerDescent) -> None:
        """Take one step of SGD on hypernetwork and embeddings with the sum of clients' gradients.

        Args:
            gradients: By client, with respect to each tensor that was generated for it, by name and of its shape.
            descent: How.
        """
        total = {name: torch.zeros_like(self._state[name]) for name in self._learned}
        for client, gradient in gradients.items():
            self._add_pulled_back(total, client, gradient)
        norm = torch.stack([part.square().sum() for part in total.values()]).sum().sqrt()
        factor = float((descent.clip / (norm + 1e-6)).clamp(max=1))
        for name, part in total.items():
            value = self._state[name]
            velocity = self._state[_VELOCITY + name] * descent.momentum
            velocity.add_(part, alpha=factor).add_(value, alpha=descent.weight_decay)
            self._state[_VELOCITY + name] = velocity
            self._state[name] = value - descent.lr * velocity

    def _add_pulled_back(self, total: dict[str, Tensor], client: int, gradient: Mapping[str, Tensor]) -> None:
        """Add what a gradient of one client's tensors is for everything that is learned."""
        along = torch.empty_like(self._state[_BIAS])
        for name, (start, shape) in self._places().items():
            along[start : start + math.prod(shape)] = gradient[name].to(along).reshape(-1)
        small, codes = self._pulled_back(client, along)
        total[_WEIGHT].addr_(along, codes)
        total[_BIAS].add_(along)
        for name, part in small.items():
            total[name].add_(part)

    def _pulled_back(self, client: int, along: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return the gradients of trunk and embeddings by name, and the codes that the heads saw."""
        trunk = {name: value.detach().requires_grad_() for name, value in self._trunk().items()}
        embedding = self._embedding(client).detach().requires_grad_()
        with torch.enable_grad():
            codes = self._codes(embedding, trunk)
        into_codes = self._state[_WEIGHT].T @ along
        found = torch.autograd.grad(codes, [embedding, *trunk.values()], into_codes)
        embeddings = torch.zeros_like(self._state[EMBEDDINGS])
        embeddings[self._rows[client]] = found[0]
        return {EMBEDDINGS: embeddings, **dict(zip(trunk, found[1:], strict=True))}, codes.detach()

    def _codes(self, embedding: Tensor, trunk: Mapping[str, Tensor]) -> Tensor:
        code = embedding
        for layer in range(len(trunk) // 2):
            code = torch.relu(torch.addmv(trunk[f"{_TRUNK}{layer}.bias"], trunk[f"{_TRUNK}{layer}.weight"], code))
        return code

    def _trunk(self) -> dict[str, Tensor]:
        return {name: value for name, value in self._state.items() if name.startswith(_TRUNK)}

    def _embedding(self, client: int) -> Tensor:
        if client not in self._rows:
            raise NameNotFound(f"The server has no embedding of client {client}.", cure="Begin with all clients.")
        return self._state[EMBEDDINGS][self._rows[client]]

    def _places(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Return where each generated tensor starts and its shape."""
        found = {name.removeprefix(_LAYOUT): value.tolist() for name, value in self._state.items() if _is_place(name)}
        return {name: (numbers[0], tuple(numbers[1:])) for name, numbers in found.items()}

    def _named(self, vector: Tensor) -> dict[str, Tensor]:
        return {
            name: vector[start : start + math.prod(shape)].view(shape)
            for name, (start, shape) in self._places().items()
        }


def _is_place(name: str) -> bool:
    return name.startswith(_LAYOUT)

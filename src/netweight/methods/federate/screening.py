"""Bounds on what one client can do to a round, and who looks odd in it.

What acts on the average is the product of an update's weight and its length, so that product is bounded. Numbers of
examples that clients claim are ignored by every rule but the plain mean, unless an operator has registered them.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor

from netweight.core import seeds
from netweight.errors import UsageError
from netweight.methods.federate.aggregators import AGGREGATORS
from netweight.methods.federate.averaging import aggregate
from netweight.methods.federate.changes import (
    OF_ALL,
    as_matrix,
    changes_of_rows,
    joint_update,
    norm_of_change,
    rows_at_once,
    shortened,
)
from netweight.methods.federate.settings import Federation
from netweight.methods.federate.updates import Tensors, Update


def screen(
    sent: Mapping[int, Tensors], state: Tensors, updates: Sequence[Update], settings: Federation, *, round: int,
    registered: Mapping[int, int] | None = None,
) -> tuple[list[Update], dict[int, str]]:  # fmt: skip
    """Bound sound updates, name odd ones, and select or join them as the settings say.

    Args:
        sent: What each client was sent, by client and tensor name.
        state: The server's tensors by name.
        updates: Sound updates of the round.
        settings: The aggregator and its bounds.
        round: The round, from 1.
        registered: Client → number of examples that somebody other than the client vouches for.

    Returns:
        The updates to average, and client → what is odd about its update.
    """
    if not updates or not updates[0].tensors:
        return list(updates), {}
    alike = all(sent[one.client].get(name) is value for one in updates for name, value in state.items())
    aggregator = settings.aggregator
    if not alike and aggregator.compares_values:
        raise UsageError(
            f"Each client receives other tensors, so that {AGGREGATORS.name_of(aggregator)} has nothing to compare.",
            cure="Use the aggregator bounded-mean, clipped-mean or mean (--aggregator; in a Flower app the setting "
            "aggregator).",
        )
    suspects: dict[int, list[str]] = {one.client: [] for one in updates}
    weighed = _weighed(updates, settings, registered, suspects)
    bounded, longest = _bounded(sent, weighed, settings, suspects)
    if alike and len(updates) > 2:
        for client, why in _odd_directions(state, bounded).items():
            suspects[client].append(why)
    # One client changes the mean by at most its share of the bound.
    if aggregator.noise_multiplier:
        deviation = aggregator.noise_multiplier * longest / sum(one.n for one in bounded)
        bounded = [_noisy(state, bounded, deviation, seeds.derive(settings.seed, "server noise", round))]
    if aggregator.leaves_out_suspects:
        sound = [one for one in bounded if not suspects[one.client]]
        bounded = sound if 2 * len(sound) >= len(bounded) else bounded
    # Where each client is sent something else, its values are not those of others: the bounded updates are averaged.
    joined = aggregator.updates_to_average(state, bounded) if alike else bounded
    return joined, {client: "; ".join(whys) for client, whys in suspects.items() if whys}


def _weighed(
    updates: Sequence[Update], settings: Federation, registered: Mapping[int, int] | None,
    suspects: Mapping[int, list[str]],
) -> list[Update]:  # fmt: skip
    """Return the updates with the weights that they have in an average: claims count in the plain mean alone."""
    most = median(one.n for one in updates) * settings.most_examples
    weighed = []
    for one in updates:
        vouched = None if registered is None else registered.get(one.client)
        if vouched is not None:
            weight = min(one.n, vouched)
            if one.n > vouched:
                suspects[one.client].append(f"claims {one.n} examples; {vouched} are registered")
        elif one.n > most and len(updates) > 2:
            weight = max(1, int(most))
            suspects[one.client].append(f"claims {one.n} examples; its weight is that of {weight}")
        else:
            weight = one.n
        trusted = vouched is not None or settings.aggregator.trusts_examples
        weighed.append(replace(one, n=weight if trusted else 1))
    return weighed


def _bounded(
    sent: Mapping[int, Tensors], updates: Sequence[Update], settings: Federation, suspects: Mapping[int, list[str]]
) -> tuple[list[Update], float]:
    """Return the updates with weight times length bounded by the round's median, and that bound."""
    norms: dict[int, float] = {}
    products = [one.n * norm_of_change(sent[one.client], one, norms) for one in updates]
    usual = median(products)
    longest = usual if settings.aggregator.bounds_to_median else usual * settings.most_norm
    bounded = []
    for one, product in zip(updates, products, strict=True):
        if product > usual * settings.most_norm:
            suspects[one.client].append(f"moves {product / max(usual, 1e-30):.3g} times as far as the median client")
        bounded.append(shortened(one, sent[one.client], longest / product) if product > longest else one)
    return bounded, longest


def _noisy(state: Tensors, updates: Sequence[Update], deviation: float, seed: int) -> Update:
    generator, mean = seeds.torch_generator(seed), aggregate(state, updates)
    noise = {
        name: torch.randn(value.shape, generator=generator, dtype=value.dtype) * deviation
        for name, value in mean.items()
        if value.is_floating_point()
    }
    return joint_update(
        updates, {name: value + noise[name].to(value) if name in noise else value for name, value in mean.items()}
    )


def _odd_directions(state: Tensors, updates: Sequence[Update]) -> dict[int, str]:
    """Return the clients that hardly move, send what another sends, or oppose the others in all or in most tensors."""
    # Honest clients of Fashion-MNIST, each with mostly three of ten classes, had cosines above 0.1 beside a liar;
    # small convolutions go either way. A large matrix is judged by rows that nobody can foresee.
    floating = [name for name, base in state.items() if base.is_floating_point() and base.numel()]
    grams = {name: _sampled_gram(state[name], name, updates) for name in floating}
    total, largest = torch.stack(list(grams.values())).sum(0), max(floating, key=lambda name: state[name].numel())
    odd: dict[int, str] = {}
    lengths = total.diagonal().clamp_min(0).sqrt()
    alike = total / (lengths[:, None] * lengths[None]).clamp_min(1e-30)
    # Honest clients with like data come near to each other, but all of them do.
    apart = 1 - alike
    usual = apart[~torch.eye(len(updates), dtype=torch.bool)].median() if len(updates) > 1 else torch.tensor(0.0)
    for row, update in enumerate(updates):
        if lengths[row] < 0.1 * lengths.median():
            odd[update.client] = "sends back nearly what it received"
        for other in range(row):
            if alike[row, other] > 0.99 and apart[row, other] < 0.01 * usual:
                for one, two in ((row, other), (other, row)):
                    odd[updates[one].client] = f"sends the same as client {updates[two].client}"
    left = [row for row, update in enumerate(updates) if update.client not in odd]
    sizes = {name: min(state[name].numel(), OF_ALL // len(updates)) for name in floating}
    views = {f"in {largest!r}": (grams[largest], sizes[largest]), "as a whole": (total, sum(sizes.values()))}
    for where, (gram, size) in views.items():
        # The worst client is removed first, because it makes others look suspicious.
        while len(left) > 2:
            cosines = _agreement(gram[left][:, left])
            worst = min(range(len(left)), key=cosines.__getitem__)
            # Beside much noise, as of differential privacy, most agree no better than by chance: nobody stands out.
            if cosines[worst] >= 0 or median(cosines) < min(0.1, 4 / size**0.5):
                break
            odd[updates[left.pop(worst)].client] = f"opposes the others {where} (cosine {cosines[worst]:.2f})"
    return odd


def _sampled_gram(base: Tensor, name: str, updates: Sequence[Update]) -> Tensor:
    matrix = as_matrix(base)
    most = rows_at_once(matrix, len(updates))
    rows = slice(None) if len(matrix) <= most else torch.randperm(
        len(matrix), generator=torch.Generator().manual_seed(secrets.randbits(62))
    )[:most]  # fmt: skip
    sample = changes_of_rows(base, name, updates, rows).double()
    return (sample @ sample.T).cpu()


def _agreement(gram: Tensor) -> list[float]:
    """Return each client's cosine with the sum of the others' directions; 1 where no client moves."""
    lengths = gram.diagonal().clamp_min(0).sqrt()
    if int((lengths > 0).sum()) < 3:
        return [1.0] * len(gram)
    unit = gram / (lengths[:, None] * lengths[None]).clamp_min(1e-30)
    towards = unit.sum(1) - unit.diagonal()
    others = unit.sum() - 2 * unit.sum(1) + unit.diagonal()
    return [float(value) for value in towards / others.clamp_min(1e-12).sqrt()]

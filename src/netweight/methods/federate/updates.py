"""What a client sends: checked on both sides (`check_allow_list`, `validate_updates`), then joined by `aggregate`.

Against clients that lie, `screen` bounds what one can change, joins by other aggregates, and says who looks odd.

Pure functions over dictionaries of tensors. The engine of one process and the Flower app call them alike.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import final

import torch
from torch import Tensor

from netweight.core import seeds
from netweight.core.names import Select
from netweight.errors import PrivateTensor, UsageError
from netweight.methods.federate.settings import Federation

# Named tensors.
Tensors = Mapping[str, Tensor]


@final
@dataclass(frozen=True)
class LowRank:
    """A matrix that differs from the server's own by a factor and a low rank: `scale · W₀ − left · rightᵀ`."""

    # That is what local SGD makes of a linear layer whose input is one vector, exactly: each step adds one rank.

    scale: float  # factor of the server's matrix W₀, which weight decay makes less than 1
    left: Tensor  # shape `(rows, rank)`
    right: Tensor  # shape `(columns, rank)`

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix."""
        return torch.Size((self.left.shape[0], self.right.shape[0]))

    def dense(self, base: Tensor) -> Tensor:
        """Return the matrix itself, given the server's."""
        return torch.addmm(base, self.left, self.right.T, beta=self.scale, alpha=-1)


@final
@dataclass(frozen=True)
class Update:
    """What one client sends after a round."""

    client: int  # its number
    n: int  # number of training examples, its weight in the average; at least 1
    # The shared tensors after local training, by the names of the server's state. Matrices may be low-rank changes.
    tensors: Mapping[str, Tensor | LowRank]
    round: int = 1  # the round that it answers, from 1


def check_allow_list(names: Iterable[str], shared: Sequence[str], *, client: int | str) -> None:
    """Refuse to send a tensor whose name no pattern of `shared` allows; a PrivateTensor error names it."""
    plain = [name.partition("|")[0] for name in names]
    private = sorted(set(plain) - set(_matching(plain, shared)))
    if private:
        raise PrivateTensor(
            f"Client {client} was about to send the private tensors {private}; nothing was sent.",
            cure=f"Shared are: {', '.join(shared) or 'none'}. Send these only, or extend the method's `shared`.",
        )


def _matching(names: Sequence[str], shared: Sequence[str]) -> list[str]:
    found: list[str] = []
    for pattern in shared:
        try:
            found += Select(pattern).keys(names)
        except UsageError:  # a pattern that matches none of these names allows none of them
            continue
    return found


@final
@dataclass(frozen=True)
class Validated:
    """A round's updates, sorted."""

    accepted: tuple[Update, ...]  # sound updates, in the order of client numbers, one per client
    refused: Mapping[int, str]  # client number → why its update was left out


def validate_updates(sent: Mapping[int, Tensors], updates: Sequence[Update], *, round: int) -> Validated:
    """Sort a round's updates into those that may be aggregated and those that are refused, each with the reason.

    An update is sound if its client was asked, sent it alone and answers this round, and if it has at least one
    example and exactly the tensors that the client was sent: names, shapes and dtypes, all values finite. What a
    sound update does to the model is not judged.

    Args:
        sent: What each client that was asked was sent, by client number and tensor name.
        updates: What came back, in any order.
        round: The round under way, from 1.

    Returns:
        Sound updates in the order of client numbers, and client number → reason for all others, those that sent
        nothing included.
    """
    accepted: dict[int, Update] = {}
    refused: dict[int, str] = {}
    for update in sorted(updates, key=lambda update: update.client):
        client = update.client
        if client not in sent:
            refused[client] = "was not asked in this round"
        elif client in accepted or client in refused:
            accepted.pop(client, None)
            refused[client] = "sent two updates in one round"
        elif (fault := fault_of(sent[client], update, round=round)) is not None:
            refused[client] = fault
        else:
            accepted[client] = update
    silent = {client: "sent nothing" for client in sent if client not in accepted and client not in refused}
    return Validated(tuple(accepted.values()), {**refused, **silent})


def fault_of(sent: Tensors, update: Update, *, round: int) -> str | None:
    """Say what is wrong with one update, or None: round, number of examples, names, shapes, kinds, finite values."""
    if update.round != round:
        return f"answers round {update.round}, not {round}: replayed or late"
    if not 1 <= update.n < 2**53:
        return f"says that it has {update.n} examples"
    missing, extra = sorted(set(sent) - set(update.tensors)), sorted(set(update.tensors) - set(sent))
    if missing or extra:
        return "; ".join(f"{word} tensors {names}" for word, names in (("missing", missing), ("extra", extra)) if names)
    for name, base in sent.items():
        fault = _tensor_fault(base, update.tensors[name])
        if fault is not None:
            return f"tensor {name!r} {fault}"
    return None


def _tensor_fault(base: Tensor, value: Tensor | LowRank) -> str | None:
    if value.shape != base.shape:
        return f"has shape {tuple(value.shape)}, not {tuple(base.shape)}"
    parts = (value,) if isinstance(value, Tensor) else (value.left, value.right)
    for part in parts:
        if part.dtype != base.dtype:
            return f"has dtype {part.dtype}, not {base.dtype}"
    largest = [_largest(part) for part in parts]
    if not all(math.isfinite(size) for size in largest):
        return "holds NaN or Inf"
    if isinstance(value, LowRank):
        # Finite factors alone do not say that their product is.
        bound = largest[0] * largest[1] * value.left.shape[1]
        if not math.isfinite(value.scale) or not bound < torch.finfo(base.dtype).max:
            return "holds NaN or Inf, or factors whose product could overflow"
    return None


def _largest(part: Tensor) -> float:
    """Return the largest magnitude, NaN if there is one and 0 for an empty tensor: one pass, in the order of memory."""
    if not part.numel():
        return 0.0
    low, high = torch.aminmax(part.T if part.ndim == 2 and part.stride(0) < part.stride(1) else part)
    return max(-low.item(), high.item()) if low == low else math.nan


def aggregate(state: Tensors, updates: Sequence[Update]) -> dict[str, Tensor]:
    """Return the average of the clients' tensors, weighted by their numbers of examples.

    Pure: nothing given is changed, and the order of `updates` does not matter, since clients are taken in the order
    of their numbers. Low-rank matrices of all clients are joined by one product.

    Args:
        state: The server's tensors, which the clients started from.
        updates: At least one, each with exactly the state's names and shapes (see `validate_updates`).

    Raises:
        UsageError: There is no update, two come from one client, or names differ from the state's.

    Source: McMahan et al., FedAvg (arXiv 1602.05629), algorithm 1; HyperFL (arXiv 2412.07187), algorithm 1.
    """
    ordered = sorted(updates, key=lambda update: update.client)
    _check(state, ordered)
    total = sum(update.n for update in ordered)
    shares = [update.n / total for update in ordered]
    return {name: _average(base, [update.tensors[name] for update in ordered], shares) for name, base in state.items()}


def _check(state: Tensors, ordered: Sequence[Update]) -> None:
    if not ordered:
        raise UsageError("There is no update to aggregate.", cure="Try the round again with more clients.")
    numbers = [update.client for update in ordered]
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"A client sent two updates in one round; clients: {numbers}.")
    for update in ordered:
        if set(update.tensors) != set(state):
            odd = sorted(set(update.tensors) ^ set(state))
            raise UsageError(f"Client {update.client}'s update and the state differ in the tensors {odd}.")
        if update.n < 1:
            raise UsageError(f"Client {update.client} says that it has {update.n} examples.")


def _average(base: Tensor, values: Sequence[Tensor | LowRank], shares: Sequence[float]) -> Tensor:
    if not base.is_floating_point():
        return base.clone()
    low = [(value, share) for value, share in zip(values, shares, strict=True) if isinstance(value, LowRank)]
    mean = _average_low_rank(base, low) if low else torch.zeros_like(base)
    for value, share in zip(values, shares, strict=True):
        if isinstance(value, Tensor):
            mean.add_(value.to(base), alpha=share)
    return mean


# Rows of a matrix whose average is made at a time: few enough to stay in the processor's cache meanwhile.
_ROWS_AT_ONCE = 4096


def _average_low_rank(base: Tensor, values: Sequence[tuple[LowRank, float]]) -> Tensor:
    """Return the weighted sum of matrices that differ from `base` by low ranks, without a copy of their factors."""
    mean = base * sum(value.scale * share for value, share in values)
    for start in range(0, len(base), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        for value, share in values:
            mean[rows].addmm_(value.left[rows], value.right.T, alpha=-share)
    return mean


_PARTS = ("scale", "left", "right")


def to_wire(tensors: Mapping[str, Tensor | LowRank]) -> dict[str, Tensor]:
    """Return tensors as they travel: a low-rank matrix becomes three, `NAME|scale`, `NAME|left`, `NAME|right`."""
    sent: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if isinstance(value, Tensor):
            sent[name] = value
        else:
            parts = (torch.tensor([value.scale], dtype=torch.float64), value.left, value.right)
            sent.update({f"{name}|{part}": tensor for part, tensor in zip(_PARTS, parts, strict=True)})
    return sent


def from_wire(sent: Tensors) -> dict[str, Tensor | LowRank]:
    """Return what `to_wire` was given."""
    tensors: dict[str, Tensor | LowRank] = {name: value for name, value in sent.items() if "|" not in name}
    for name in {name.rpartition("|")[0] for name in sent if "|" in name}:
        parts = [sent.get(f"{name}|{part}") for part in _PARTS]
        scale, left, right = parts
        if scale is None or left is None or right is None:
            raise UsageError(f"The low-rank matrix {name!r} came without one of its parts {_PARTS}.")
        if scale.numel() != 1 or left.ndim != 2 or right.ndim != 2 or left.shape[1] != right.shape[1]:
            shapes = [tuple(part.shape) for part in (scale, left, right)]
            raise UsageError(f"The parts of the low-rank matrix {name!r} do not fit: shapes {shapes}.")
        tensors[name] = LowRank(float(scale), left, right)
    return tensors


# Values of a tensor that are looked at at a time, of one client and of all together.
_AT_ONCE, _OF_ALL = 2**20, 2**22


@final
@dataclass(frozen=True)
class Screened:
    """A round's updates as they may be joined."""

    updates: tuple[Update, ...]  # those of single clients, or one for all where the aggregate was made here
    suspects: Mapping[int, str] = field(default_factory=dict)  # client → what is odd


def screen(
    sent: Mapping[int, Tensors], state: Tensors, updates: Sequence[Update], settings: Federation, *, round: int
) -> Screened:
    """Bound sound updates by those of the round, name odd ones, and select or join them as the settings say."""
    if not updates or not updates[0].tensors:
        return Screened(tuple(updates))
    alike = all(sent[one.client].get(name) is value for one in updates for name, value in state.items())
    if not alike and settings.aggregator not in ("mean", "screened-mean", "clipped-mean"):
        raise UsageError(
            f"Each client is sent something else, so that {settings.aggregator} has nothing to compare.",
            cure="Use the aggregator mean or clipped-mean.",
        )
    norms: dict[int, float] = {}
    lengths = [_length(sent[one.client], one, norms) for one in updates]
    suspects: dict[int, list[str]] = {one.client: [] for one in updates}
    clipped = settings.aggregator == "clipped-mean"
    usual, most = median(lengths), median(one.n for one in updates) * settings.most_examples
    longest = usual if clipped else usual * settings.most_norm
    bounded = []
    for one, length in zip(updates, lengths, strict=True):
        if one.n > most and len(updates) > 2:
            suspects[one.client].append(f"says that it has {one.n} examples; it counts for {int(most)}")
            one = replace(one, n=max(1, int(most)))
        if length > usual * settings.most_norm:
            suspects[one.client].append(f"moves {length / max(usual, 1e-30):.3g} times as far as the median client")
        if length > longest:
            one = _shortened(one, sent[one.client], longest / length)
        bounded.append(replace(one, n=1) if clipped else one)
    ordinary = sorted(updates, key=lambda one: one.client)
    if alike and len(ordinary) > 2:
        for client, why in _odd_directions(state, bounded).items():
            suspects[client].append(why)
    if clipped and settings.server_noise:
        deviation = settings.server_noise * longest / len(bounded)
        bounded = [_noisy(state, bounded, deviation, seeds.derive(settings.seed, "server noise", round))]
    if settings.aggregator == "screened-mean":
        sound = [one for one in bounded if not suspects[one.client]]
        bounded = sound if 2 * len(sound) >= len(bounded) else bounded
    joined = _RULES[settings.aggregator](state, bounded, settings.liars)
    return Screened(tuple(joined), {client: "; ".join(whys) for client, whys in suspects.items() if whys})


def _length(sent: Tensors, update: Update, norms: dict[int, float]) -> float:
    """Return the norm of an update's change; for a low-rank matrix an upper bound that needs no dense one."""
    # `norms` remembers those of tensors that were sent, by identity: they are large, and mostly the same for all.
    squares = 0.0
    for name, value in update.tensors.items():
        base = sent[name]
        if isinstance(value, LowRank):
            gram = (value.left.T @ value.left).double() * (value.right.T @ value.right).double()
            own = max(float(gram.sum()), 0.0) ** 0.5
            if value.scale != 1:
                if id(base) not in norms:
                    norms[id(base)] = float(base.norm())
                own += abs(value.scale - 1) * norms[id(base)]
            squares += own**2
        elif base.is_floating_point():
            squares += float((value - base).double().square().sum())
    return math.sqrt(squares)


def _shortened(update: Update, sent: Tensors, factor: float) -> Update:
    def of(base: Tensor, value: Tensor | LowRank) -> Tensor | LowRank:
        if isinstance(value, LowRank):
            return LowRank(1 + factor * (value.scale - 1), value.left * factor, value.right)
        return base + factor * (value - base) if base.is_floating_point() else value

    return replace(update, tensors={name: of(sent[name], value) for name, value in update.tensors.items()})


def _noisy(state: Tensors, updates: Sequence[Update], deviation: float, seed: int) -> Update:
    generator, mean = seeds.torch_generator(seed), aggregate(state, updates)
    noise = {
        name: torch.randn(value.shape, generator=generator, dtype=value.dtype) * deviation
        for name, value in mean.items()
        if value.is_floating_point()
    }
    return _joint(
        updates, {name: value + noise[name].to(value) if name in noise else value for name, value in mean.items()}
    )


def _joint(updates: Sequence[Update], tensors: Tensors) -> Update:
    return Update(updates[0].client, sum(one.n for one in updates), tensors, updates[0].round)


def _changes(base: Tensor, name: str, updates: Sequence[Update], rows: slice | Tensor) -> Tensor:
    """Return some rows of every client's change of a tensor, flat: shape `(clients, values)`."""
    own = _matrix(base)[rows]
    found = []
    for update in updates:
        value = update.tensors[name]
        if isinstance(value, LowRank):
            part = torch.addmm(own, value.left[rows], value.right.T, beta=value.scale - 1, alpha=-1)
        else:
            part = _matrix(value)[rows] - own
        found.append(part.flatten())
    return torch.stack(found)


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(len(tensor), -1) if tensor.ndim else tensor.reshape(1, 1)


def _by_coordinate(state: Tensors, updates: Sequence[Update], rule: Callable[[Tensor], Tensor]) -> list[Update]:
    """Return an update by a rule that makes one value of each row of sorted ones, shape `(values, clients)`."""
    made = {}
    for name, base in state.items():
        made[name] = base.clone()
        if base.is_floating_point() and base.numel():
            matrix = _matrix(made[name])
            for rows in _blocks(matrix, len(updates)):
                found = _changes(base, name, updates, rows).T.sort(dim=1).values
                matrix[rows] += rule(found).view_as(matrix[rows])
    return [_joint(updates, made)]


def _rows_at_once(matrix: Tensor, clients: int) -> int:
    return max(1, min(_AT_ONCE, _OF_ALL // clients) // max(matrix.shape[1], 1))


def _blocks(matrix: Tensor, clients: int) -> Iterator[slice]:
    step = _rows_at_once(matrix, clients)
    for start in range(0, len(matrix), step):
        yield slice(start, start + step)


def _gram(state: Tensors, updates: Sequence[Update]) -> Tensor:
    """Return the inner products of clients' changes, shape `(clients, clients)`, float64."""
    total = torch.zeros(len(updates), len(updates), dtype=torch.float64)
    for name, base in state.items():
        if base.is_floating_point() and base.numel():
            for rows in _blocks(_matrix(base), len(updates)):
                found = _changes(base, name, updates, rows).double()
                total += (found @ found.T).cpu()
    return total


def _trimmed(state: Tensors, updates: Sequence[Update], liars: int) -> list[Update]:
    """Without the `liars` largest and smallest of each value. Source: Yin et al. (arXiv 1803.01498)."""
    cut = min(liars, (len(updates) - 1) // 2)
    return _by_coordinate(state, updates, lambda values: values[:, cut : values.shape[1] - cut].mean(1))


def _median(state: Tensors, updates: Sequence[Update], liars: int) -> list[Update]:
    return _trimmed(state, updates, len(updates))


def _krum(state: Tensors, updates: Sequence[Update], liars: int, *, keep: int = 1) -> list[Update]:
    """The updates that are nearest to most others. Source: Blanchard et al. (NeurIPS 2017), Krum and multi-Krum."""
    gram = _gram(state, updates)
    own = gram.diagonal()
    distances = (own[:, None] + own[None] - 2 * gram).clamp_min(0).fill_diagonal_(torch.inf)
    near = max(1, len(updates) - liars - 2)
    scores = distances.sort(dim=1).values[:, :near].sum(1)
    return [updates[row] for row in scores.argsort(stable=True)[:keep].sort().values.tolist()]


def _multi_krum(state: Tensors, updates: Sequence[Update], liars: int) -> list[Update]:
    return _krum(state, updates, liars, keep=max(1, len(updates) - liars))


def _all(state: Tensors, updates: Sequence[Update], liars: int) -> list[Update]:
    return list(updates)


_RULES: Mapping[str, Callable[[Tensors, Sequence[Update], int], list[Update]]] = {
    "mean": _all, "screened-mean": _all, "clipped-mean": _all, "trimmed-mean": _trimmed, "median": _median,
    "krum": _krum, "multi-krum": _multi_krum,
}  # fmt: skip


def _odd_directions(state: Tensors, updates: Sequence[Update]) -> dict[int, str]:
    """Say which clients hardly move, send what another sends, or go against the others as a whole or where most is."""
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
            odd[update.client] = "hardly moves: it sends back what it received"
        for other in range(row):
            if alike[row, other] > 0.99 and apart[row, other] < 0.01 * usual:
                for one, two in ((row, other), (other, row)):
                    odd[updates[one].client] = f"sends the same as client {updates[two].client}"
    left = [row for row, update in enumerate(updates) if update.client not in odd]
    sizes = {name: min(state[name].numel(), _OF_ALL // len(updates)) for name in floating}
    seen = {f"in {largest!r}": (grams[largest], sizes[largest]), "as a whole": (total, sum(sizes.values()))}
    for where, (gram, size) in seen.items():
        while len(left) > 2:  # the worst first: beside it others seem to go astray
            cosines = _agreement(gram[left][:, left])
            worst = min(range(len(left)), key=cosines.__getitem__)
            # Beside much noise, as of differential privacy, most agree no better than by chance: nobody stands out.
            if cosines[worst] >= 0 or median(cosines) < min(0.1, 4 / size**0.5):
                break
            odd[updates[left.pop(worst)].client] = f"goes against the others {where} (cosine {cosines[worst]:.2f})"
    return odd


def _sampled_gram(base: Tensor, name: str, updates: Sequence[Update]) -> Tensor:
    matrix = _matrix(base)
    wanted = _rows_at_once(matrix, len(updates))
    rows = slice(None) if len(matrix) <= wanted else torch.randperm(
        len(matrix), generator=torch.Generator().manual_seed(secrets.randbits(62))
    )[:wanted]  # fmt: skip
    found = _changes(base, name, updates, rows).double()
    return (found @ found.T).cpu()


def _agreement(gram: Tensor) -> list[float]:
    """Return each client's cosine with the sum of the others' directions; 1 where nobody moves."""
    lengths = gram.diagonal().clamp_min(0).sqrt()
    if int((lengths > 0).sum()) < 3:
        return [1.0] * len(gram)
    unit = gram / (lengths[:, None] * lengths[None]).clamp_min(1e-30)
    towards = unit.sum(1) - unit.diagonal()
    others = unit.sum() - 2 * unit.sum(1) + unit.diagonal()
    return [float(value) for value in towards / others.clamp_min(1e-12).sqrt()]

"""The privacy account of a whole federation: every example is counted over all clients that hold it.

Partitions may give one example to several clients, as HyperFL's own does. Each of them then spends ε of that example.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence

from netweight.core.tensor_bytes import row_major_bytes
from netweight.errors import UsageError
from netweight.methods.federate.accounting import (
    AnswerPrivacy,
    Guarantee,
    epsilon_of,
    guarantee,
    noise_multiplier_for_all,
    privacy_of,
    schedule_of,
)
from netweight.methods.federate.method import Method
from netweight.methods.federate.task import Task


def holders_of_examples(task: Task, clients: Iterable[int]) -> list[tuple[int, ...]]:
    """Return the distinct groups of clients that hold one and the same training example.

    Two clients hold the same example if their inputs and targets are equal byte for byte. Equal rows of one client are
    examples of their own, as everywhere in differential privacy. Groups that are part of another one are left out,
    since they never spend more.

    Args:
        task: The task with every client's data.
        clients: The clients to look at.
    """
    holders: dict[bytes, set[int]] = {}
    for client in clients:
        inputs, targets = (part.detach().cpu().contiguous() for part in task.client(client).train)
        for x, y in zip(inputs, targets, strict=True):
            row = b"".join(row_major_bytes(part).numpy().tobytes() for part in (x, y))
            holders.setdefault(hashlib.blake2b(row, digest_size=16).digest(), set()).add(client)
    largest: list[frozenset[int]] = []
    groups = {frozenset(group) for group in holders.values()}
    for group in sorted(groups, key=lambda group: (-len(group), sorted(group))):
        if not any(group < other for other in largest):
            largest.append(group)
    return [tuple(sorted(group)) for group in largest]


def task_guarantee(task: Task, method: Method, answers: Mapping[int, int], delta: float) -> Guarantee | None:
    """Return what all answers of a federation give away of the example, or the client, for which they do most.

    Examples that several clients hold are counted over all of their answers.

    Args:
        task: The task with every client's data.
        method: How clients train, with its noise.
        answers: Client → how many answers it gave, repeated attempts included.
        delta: δ, in (0, 1).

    Returns:
        The guarantee; None if the method adds no noise or nobody has answered.
    """
    one = {client: privacy_of(method, task.client(client).n) for client, count in answers.items() if count}
    if not one or not any(each.releases for each in one.values()):
        return None
    most = max(answers.values())
    each = guarantee([privacy for privacy in one.values()], delta)
    if each.caveats or each.unit == "client":
        worst = max(answers, key=lambda client: answers[client])
        return guarantee([one[worst]] * most, delta) if not each.caveats else Guarantee(
            each.unit, math.inf, delta, each.noise, each.sampling, most, each.caveats
        )  # fmt: skip
    spent, counted, group = max(
        (epsilon_of(_history(group, one, answers), delta), sum(answers.get(c, 0) for c in group), group)
        for group in holders_of_examples(task, one)
    )
    return Guarantee("example", spent, delta, each.noise, each.sampling, counted, holders=len(group))


def _history(
    group: Sequence[int], one: Mapping[int, AnswerPrivacy], answers: Mapping[int, int]
) -> list[tuple[float, float, int]]:
    """Return what an example goes through that a group of clients holds: noise, rate and steps at each of them."""
    return [(r.noise, r.rate, r.steps * answers[client]) for client in group for r in one[client].releases]


def noise_for_task(task: Task, epsilon: float, delta: float, *, batch_size: int, epochs: int) -> float:
    """Return the least noise multiplier of DP-SGD that keeps every example of a task (ε, δ)-differentially private.

    Args:
        task: The task with every client's data; an example that several clients hold is counted over all of them.
        epsilon: ε for one example added or removed, over all answers together.
        delta: δ, below 1 over the largest client's number of examples.
        batch_size: Expected number of examples in a step.
        epochs: Passes over a client's examples, all rounds together.

    Raises:
        UsageError: The budget is out of range, or no noise keeps it.
    """
    sizes = {client: task.client(client).n for client in task.clients}
    least = noise_multiplier_for_all(epsilon, delta, sizes=sizes.values(), batch_size=batch_size, epochs=epochs)
    groups = [group for group in holders_of_examples(task, task.clients) if len(group) > 1]
    schedules = {client: schedule_of(n, batch_size, epochs) for client, n in sizes.items()}

    def within(noise: float) -> bool:
        return all(epsilon_of([(noise, *schedules[c]) for c in group], delta) <= epsilon for group in groups)

    if within(least):
        return least
    low, high = least, 2 * least
    while not within(high):
        if high > 1e4 * least:
            raise UsageError(
                f"No noise keeps ε at {epsilon} where clients have the same examples.",
                cure="Allow a larger epsilon or delta, or train for fewer epochs (in a command: --epsilon, --delta, "
                "--epochs, --rounds).",
            )
        low, high = high, 2 * high
    while high > 1.01 * low:
        middle = (low + high) / 2
        low, high = (low, middle) if within(middle) else (middle, high)
    return high

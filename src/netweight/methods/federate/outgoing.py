"""The last check before a client sends: only names on the method's allow-list leave it. Both engines call it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from netweight.core.names import Select
from netweight.errors import PrivateTensor, UsageError

__all__ = ["check_outgoing"]


def check_outgoing(names: Iterable[str], shared: Sequence[str], *, client: int | str) -> None:
    """Refuse to send anything that is not shared.

    Args:
        names: Names of all tensors about to leave; a part of a low-rank matrix, `NAME|left`, counts as NAME.
        shared: The method's patterns of shared names; none means that nothing may leave.
        client: Who is sending, for the message.

    Raises:
        PrivateTensor: A name matches no pattern.
    """
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

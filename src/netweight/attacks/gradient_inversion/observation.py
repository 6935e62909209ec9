"""What was observed of a client: checked against what it would send, before an attack begins. Attacks call it."""

from __future__ import annotations

from netweight.attacks.gradient_inversion.victim import Tensors
from netweight.core.names import Select, nearest_names
from netweight.errors import NameNotFound, UsageError

__all__ = ["chosen_tensors"]


def chosen_tensors(observed: Tensors, patterns: str | tuple[str, ...] | None, imitated: Tensors) -> Tensors:
    """Return the observed tensors that an attack is to match.

    Args:
        observed: What the client sent. Tensors by name.
        patterns: Patterns (`netweight.Select`) of the tensors to take; None takes all.
        imitated: What the client would send for some batch. Tensors by name.

    Returns:
        The chosen tensors, with the device and dtype of the imitated ones, in the order observed.

    Raises:
        NameNotFound: A pattern matches nothing, or the client would not send a tensor of that name.
        UsageError: Nothing was observed, or a tensor has another shape or holds NaN or infinity.
    """
    names = list(observed) if patterns is None else Select.of(patterns).keys(observed)
    if not names:
        raise UsageError("Nothing was observed, so there is nothing to match.")
    for name in names:
        if name not in imitated:
            near = ", ".join(nearest_names(name, imitated)) or "none"
            raise NameNotFound(f"The client would send no tensor {name!r}.", cure=f"Nearest: {near}.")
        if observed[name].shape != imitated[name].shape:
            seen, sent = tuple(observed[name].shape), tuple(imitated[name].shape)
            raise UsageError(f"The observed tensor {name!r} has shape {seen}; the client would send {sent}.")
        if not observed[name].isfinite().all():
            raise UsageError(f"The observed tensor {name!r} holds NaN or infinity.", cure="Leave it out by a pattern.")
    return {name: observed[name].detach().to(imitated[name]) for name in names}

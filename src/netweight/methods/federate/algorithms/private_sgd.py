"""Methods whose clients train by DP-SGD: DP-FedAvg, CENTAUR and PPSGD."""

from __future__ import annotations

from typing import Any

from netweight.methods.federate.algorithms.direct import DirectMethod, head_phase, phase
from netweight.methods.federate.settings import LocalTraining, Privacy


def dp_fedavg(noise_multiplier: float, *, training: LocalTraining = LocalTraining(), **privacy: Any) -> DirectMethod:
    """Return FedAvg whose clients train the whole model by DP-SGD; `privacy` are further fields of `Privacy`.

    Source: DP-FedAvg as HyperFL (arXiv 2412.07187) compares with it; Abadi et al. (arXiv 1607.00133).
    """
    how = Privacy(noise_multiplier=noise_multiplier, **privacy)
    return DirectMethod("dp-fedavg", ("body", "head"), (phase("both", training, how),), training)


def centaur(noise_multiplier: float, *, training: LocalTraining = LocalTraining(), **privacy: Any) -> DirectMethod:
    """Return CENTAUR: first the private head by plain SGD, then the body by DP-SGD; the body alone is shared.

    Source: Shen et al., CENTAUR (arXiv 2206.07902), with DP-SGD at the client as HyperFL compares with it.
    """
    how = Privacy(noise_multiplier=noise_multiplier, **privacy)
    return DirectMethod("centaur", ("body",), (head_phase(training), phase("body", training, how)), training)


def ppsgd(noise_multiplier: float, *, training: LocalTraining = LocalTraining(), **privacy: Any) -> DirectMethod:
    """Return PPSGD: on each batch a plain step of the private head, then a DP-SGD step of the shared body.

    Source: Bietti et al., PPSGD (arXiv 2202.05318), in the form that HyperFL compares with.
    """
    how = Privacy(noise_multiplier=noise_multiplier, **privacy)
    body = phase("body", training, how).replace(head_lr=training.head_lr)
    return DirectMethod("ppsgd", ("body",), (body,), training)

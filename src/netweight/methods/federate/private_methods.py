"""Methods with differentially private local training: DP-FedAvg, CENTAUR, PPSGD. The catalog and studies call it.

They follow HyperFL's comparison, in which each client protects its single examples by DP-SGD. In CENTAUR and PPSGD the
head learns from the same examples without noise and the body's gradients depend on it, so that no accountant's ε for
the body's steps alone holds for the examples; their papers protect whole clients instead, where it does.
"""

from __future__ import annotations

from typing import Literal

from netweight.methods.federate.config import LocalTraining, Phase, Privacy
from netweight.methods.federate.direct import DirectMethod

__all__ = ["centaur", "dp_fedavg", "epsilon_caveats", "ppsgd"]

Sampling = Literal["poisson", "shuffled"]


def dp_fedavg(
    noise_multiplier: float,
    *,
    training: LocalTraining = LocalTraining(),
    clip: float = 0.04,
    sampling: Sampling = "poisson",
) -> DirectMethod:
    """Return FedAvg whose clients train the whole model by DP-SGD.

    Args:
        noise_multiplier: Standard deviation of the noise as a multiple of `clip`, the same for all clients;
            `netweight.integrations.opacus.noise_multiplier_for_all` turns an ε into one that is enough for each.
        training: Epochs, learning rate, batch size, momentum, weight decay.
        clip: Largest norm of one example's gradient.
        sampling: "poisson", or "shuffled" as in the paper's code; see `epsilon_caveats`.

    Source: DP-FedAvg as HyperFL (arXiv 2412.07187) compares with it; Abadi et al. (arXiv 1607.00133).
    """
    privacy = Privacy(noise_multiplier, clip, sampling)
    phases = (Phase("both", training.epochs, training.lr, privacy),)
    return DirectMethod("dp-fedavg", ("body", "head"), phases, training)


def centaur(
    noise_multiplier: float,
    *,
    training: LocalTraining = LocalTraining(),
    clip: float = 0.04,
    sampling: Sampling = "poisson",
) -> DirectMethod:
    """Return CENTAUR: first the private head by plain SGD, then the body by DP-SGD; the body alone is shared.

    Args:
        noise_multiplier: As in `dp_fedavg`; so are the others.
        training: `head_epochs` and `head_lr` are of the head's own phase.
        clip: Largest norm of one example's gradient of the body.
        sampling: Of the body's phase.

    Source: Shen et al., CENTAUR (arXiv 2206.07902), with DP-SGD at the client as HyperFL compares with it.
    """
    privacy = Privacy(noise_multiplier, clip, sampling)
    phases = (
        Phase("head", training.head_epochs, training.head_lr),
        Phase("body", training.epochs, training.lr, privacy),
    )
    return DirectMethod("centaur", ("body",), phases, training)


def ppsgd(
    noise_multiplier: float,
    *,
    training: LocalTraining = LocalTraining(),
    clip: float = 0.04,
    sampling: Sampling = "poisson",
) -> DirectMethod:
    """Return PPSGD: on each batch a plain step of the private head, then a DP-SGD step of the shared body.

    The body's gradient is taken at the head as the step before left it.

    Args:
        noise_multiplier: As in `dp_fedavg`; so are the others.
        training: `head_lr` is of the head's steps.
        clip: Largest norm of one example's gradient of the body.
        sampling: Of the batches that both steps see.

    Source: Bietti et al., PPSGD (arXiv 2202.05318), in the form that HyperFL compares with.
    """
    phase = Phase("body", training.epochs, training.lr, Privacy(noise_multiplier, clip, sampling), training.head_lr)
    return DirectMethod("ppsgd", ("body",), (phase,), training)


def epsilon_caveats(method: DirectMethod) -> tuple[str, ...]:
    """Say why an accountant's ε would not hold for what a method's clients send.

    Nothing is said if it holds, and of a method without privacy. Findings and tables show these beside any ε.

    Args:
        method: With or without privacy.
    """
    private = [phase for phase in method.phases if phase.privacy is not None]
    if not private:
        return ()
    caveats = []
    if any(phase.privacy is not None and phase.privacy.sampling == "shuffled" for phase in private):
        caveats.append("epsilon not valid: batches are shuffled, and accountants assume Poisson sampling")
    if len(private) < len(method.phases) or any(phase.head_lr is not None for phase in private):
        caveats.append("epsilon not valid: the head learns from the same examples without noise and steers the body")
    return tuple(caveats)

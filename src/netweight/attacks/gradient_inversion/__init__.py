"""Gradient inversion: private images from the gradient or the update that a client sent.

Every attack takes `local_update(params, (images, labels)) -> tensors`, the client's own training rule (`client.py`), so
it works on any PyTorch model and any rule that is differentiable with respect to the images. `run_attack` of
`matching.py` has the generic ones by name; those on generated weights are in `tailored.py` and `chains.py`.
"""

from netweight.core.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "dlg": "netweight.attacks.gradient_inversion.matching",
        "imprint": "netweight.attacks.gradient_inversion.chains",
        "invert": "netweight.attacks.gradient_inversion.matching",
        "invert_generated": "netweight.attacks.gradient_inversion.tailored",
        "recover_gradient": "netweight.attacks.gradient_inversion.analytic",
        "rog": "netweight.attacks.gradient_inversion.matching",
    },
)

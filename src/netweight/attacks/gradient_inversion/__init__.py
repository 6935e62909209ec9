"""Gradient inversion: private images from the gradient or the update that a client sent.

Every attack takes `local_update(params, (images, labels)) -> tensors`, the client's own training rule (`client.py`), so
it works on any PyTorch model and any rule that is differentiable with respect to the images. `run_attack` of
`registry.py` has the generic ones by name; those on generated weights are in `tailored.py` and `imprint.py`.
"""

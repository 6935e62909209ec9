"""A small federation: three clients of noisy clusters, two layers, any method."""

import torch
from torch import nn

from netweight.methods.federate import ClientData, HyperFL, LocalTraining, Task, fedavg
from netweight.methods.federate.algorithms.direct import fedavg_private_head, local_only
from netweight.methods.federate.algorithms.pfedhn import PFedHN
from netweight.methods.federate.catalog import named_method

CLIENTS = 3
TRAINING = LocalTraining(epochs=1, batch_size=8)
METHODS = {
    "hyperfl": HyperFL(TRAINING, embedding=4, hidden=(6,)),
    "fedavg": fedavg(TRAINING),
    "fedavg-private-head": fedavg_private_head(TRAINING),
    "local": local_only(TRAINING),
    "pfedhn": PFedHN(steps=3, hidden=(6,), training=TRAINING),
    "pfedhn-pc": PFedHN("pfedhn-pc", local_head=True, steps=3, hidden=(6,), training=TRAINING),
    "dp-fedavg": named_method("dp-fedavg", training=TRAINING, noise_multiplier=1.0),
}


def halves():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(8, 6), nn.Tanh()), nn.Linear(6, 3)


def client_data(number):
    generator = torch.Generator().manual_seed(100 + number)
    centers = torch.randn(3, 8, generator=torch.Generator().manual_seed(9))

    def draw(n):
        targets = torch.randint(3, (n,), generator=generator)
        return centers[targets] + torch.randn(n, 8, generator=generator), targets

    return ClientData(draw(20 + 4 * number), draw(15))


def whole_task():
    return Task(*halves(), [client_data(number) for number in range(CLIENTS)])

"""Memory of a server by the number of its clients: one round of HyperFL on Fashion-MNIST, as over Flower.

    NETWEIGHT_DATA=... python -m netweight_experiments.benchmarks federate.server_memory

Clients of 600 images train one epoch each, in this process, when their reply is pulled: of all memory that is no file's
(RssAnon) the highest value while replies come, are screened and averaged, less that before the round. Clients' training
is in it and does not depend on their number. From the root of the source tree.
"""

import logging
import sys
import tempfile
from functools import partial
from pathlib import Path

from netweight_experiments.benchmarks.script import fill
from netweight_experiments.memory import PrivateMemory, in_fresh_process, private_bytes


def measure(given):
    """Run one round; return the highest memory above that before it, in bytes."""
    clients, aggregator = given
    sys.path.insert(0, str(Path("tests/support").resolve()))
    from flower_under_test import GridHere, RecordDict
    from flwr.app import Context

    from netweight.data.images import load
    from netweight.methods.federate import Federation, HyperFL, LocalTraining, Task
    from netweight.methods.federate.partition import federated_images
    from netweight.methods.federate.task import small_cnn
    from netweight.plugins.flower import Elsewhere, client_app, server_app

    logging.disable(logging.INFO)
    data, method = federated_images(load("fashion-mnist"), clients=clients), HyperFL(LocalTraining(epochs=1))
    halves = small_cnn(1, 28, 10, seed=0)
    app = client_app(lambda context: Task(*halves, {n: data[n] for n in [context.node_config["partition-id"]]}), method)
    grid = GridHere({100 + n: app for n in range(clients)}, {100 + n: n for n in range(clients)})
    grid._note = lambda node, reply: None
    grid.traffic = type("Nothing", (), {"append": lambda self, item: None})()
    before = private_bytes()
    with tempfile.TemporaryDirectory() as folder:
        server = server_app(
            lambda context: Task(*halves, Elsewhere(clients)), method, Federation(rounds=1, aggregator=aggregator),
            folder=folder, timeout=0.0, patience=0.0,
        )  # fmt: skip
        with PrivateMemory() as memory:
            server(grid, Context(1, 1, {}, RecordDict(), {}, 0))
    return memory.highest - before


def main(*, clients: tuple[int, ...] = (10, 30, 100), aggregators: tuple[str, ...] = ("screened-mean",), output: Path):
    # Each in a process of its own: memory that is freed is not always given back.
    yield from fill(output, "bytes", (
        (f"{aggregator}, {count} clients", partial(in_fresh_process, measure, [count, aggregator]))
        for aggregator in aggregators for count in clients
    ))  # fmt: skip

"""Federated methods on Flower: the same `Method` objects as in the engine of one process, as ClientApp and ServerApp.

`apps` makes both apps of a user's model and data, `client_app` and `server_app` one each with all their options,
`Elsewhere` stands for data that a server does not have, and private tensors are exported and imported by
`export_private` and `import_private`. Needs the extra `federated`.
"""

import warnings

from netweight.core.lazy import extra

with extra("federated", "Federated learning over a network needs Flower 1.41"), warnings.catch_warnings():
    # Flower's typer asks click for names that click is going to drop.
    warnings.filterwarnings("ignore", "'click.utils", DeprecationWarning)
    import flwr.app  # noqa: F401

from netweight.plugins.flower.client import client_app as client_app
from netweight.plugins.flower.client import export_private as export_private
from netweight.plugins.flower.client import import_private as import_private
from netweight.plugins.flower.server import HISTORY as HISTORY
from netweight.plugins.flower.server import Elsewhere as Elsewhere
from netweight.plugins.flower.server import apps as apps
from netweight.plugins.flower.server import server_app as server_app
from netweight.plugins.flower.strategy import MethodStrategy as MethodStrategy

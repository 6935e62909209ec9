"""The server: it knows the model and how many clients there are, and has no data."""

from flwr.app import Context

from digits.task import method, model, settings
from netweight.methods.federate import Task
from netweight.plugins.flower import Elsewhere, server_app


def task(context: Context) -> Task:
    """The model, and data that are elsewhere."""
    config = context.run_config
    return Task(*model(config), Elsewhere(int(config["clients"])))


app = server_app(
    task,
    lambda context: method(context.run_config),
    lambda context: settings(context.run_config),
    folder=lambda context: str(context.run_config["folder"]),
    timeout=lambda context: float(context.run_config["timeout"]),
    patience=lambda context: float(context.run_config["patience"]),
    secure_sum=lambda context: bool(context.run_config["secure-sum"]),
)

"""A client: it has its own data, and keeps its head and embedding on its own disk."""

from flwr.app import Context

from digits.task import client_data, method, model
from netweight.methods.federate import Task
from netweight.plugins.flower import client_app


def task(context: Context) -> Task:
    """The model and this client's data."""
    config, number = context.run_config, int(context.node_config["partition-id"])
    return Task(*model(config), {number: client_data(config, number)})


def folder(context: Context) -> str | None:
    """Where this node keeps what is private: its own configuration says so, else the run's."""
    return str(context.node_config.get("private-folder") or context.run_config["private-folder"]) or None


app = client_app(
    task,
    lambda context: method(context.run_config),
    folder=folder,
    # A seed that others know is for rehearsals; without it a client draws a secret one.
    seed=lambda context: context.node_config.get("rehearsal-seed"),
    # Who insists on masks takes them from the node's own configuration, which the server cannot change.
    secure_sum=lambda context: bool(context.node_config.get("secure-sum", context.run_config["secure-sum"])),
)

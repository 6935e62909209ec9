"""A federation as commands and recipes ask for it: methods and data by name, one class of settings for both."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, final

from pydantic import Field, FilePath

from netweight.core.atomic_writes import whole_file
from netweight.core.foreign_errors import running
from netweight.core.lazy import import_named
from netweight.core.names import not_found
from netweight.errors import UsageError
from netweight.hf.pipeline_settings import parsed_size
from netweight.methods.federate.catalog import entry_of, named_method
from netweight.methods.federate.settings import Federation, Lie, LocalTraining
from netweight.settings import Cli, Settings

if TYPE_CHECKING:
    from torch import nn

    from netweight.data.images import Images
    from netweight.methods.federate.method import Method
    from netweight.methods.federate.task import Task

# Name of the settings' file in a run's folder.
PLAN_FILE = "federation.json"
# The seed with which the HyperFL paper's code splits data, whatever the seed of the model.
REFERENCE_SPLIT = 2022
# ε of dp-fedavg where none is given, as in the HyperFL paper.
DEFAULT_EPSILON = 4.0
# Norm to which an update is clipped where noise is added and no norm is given.
_UPDATE_CLIP = 1.0


class _Clients(Settings):
    """Settings of the clients and of the partition of data."""

    method: str = Field(
        default="fedavg",
        description="Federated learning method: fedavg, fedavg-private-head, fedrep, fedprox, ditto, fedbn, scaffold, "
        "hyperfl, hyperfl-body, hyperfl-whole, pfedhn, pfedhn-pc, local (each client alone), dp-fedavg, centaur or "
        "ppsgd. The page on federated learning compares them.",
    )
    clients: int = Field(default=20, ge=1, description="Number of clients.")
    partition: Literal["dominant-groups", "dirichlet", "by-writer"] = Field(
        default="dominant-groups",
        description="Division of the examples among the clients. dominant-groups: each client has a few "
        "main classes; dirichlet: shares of classes are drawn; by-writer: one writer for each "
        "client.",
    )
    alpha: float = Field(
        default=0.5,
        gt=0,
        description="Concentration of the Dirichlet partition; smaller values give clients fewer classes.",
    )
    size: Annotated[str | None, Cli(metavar="HEIGHTxWIDTH")] = Field(
        default=None,
        description="Height and width in pixels to which the pictures of a folder are brought, such as 28 or 28x32; "
        "needed where their sizes differ. Named data sets keep their own size.",
    )
    fit: Literal["crop", "stretch", "pad"] = Field(
        default="stretch",
        description="Conversion of pictures of another shape to --size: stretch distorts; crop cuts out the middle; "
        "pad adds black bars.",
    )
    model: str | None = Field(
        default=None,
        description="Network of your own as MODULE:FUNCTION. The function takes channels, image size and "
        "number of classes, and returns body and head; the size is one number for square images, else height and "
        "width.",
    )

    def check(self) -> None:
        """Refuse a size that cannot be read, and one for data that has its own."""
        super().check()
        if self.size is not None:
            parsed_size(self.size)
        elif self.fit != "stretch":
            raise UsageError(
                f"--fit {self.fit} has no effect without a size that pictures are brought to.", cure="Give --size."
            )


class _Request(Federation, _Clients):
    """All that decides a federation but its data."""

    rounds: int = Field(default=20, ge=1, description="Number of rounds.")
    epochs: int = Field(default=5, ge=1, description="Local epochs in each round.")
    batch_size: int = Field(default=50, ge=1, description="Examples in each local step.")
    lr: float | None = Field(
        default=None, gt=0, description="Learning rate of the shared weights; by default that of the method."
    )
    epsilon: float | None = Field(
        default=None, gt=0,
        description="Privacy budget ε of dp-fedavg, for one example added or removed, over all updates of all "
        "clients that have it. By default 4.",
    )  # fmt: skip
    delta: float = Field(default=1e-5, gt=0, lt=1, description="δ of the privacy budget.")
    noise_multiplier: float | None = Field(
        default=None, gt=0,
        description="Standard deviation of the noise that dp-fedavg, centaur or ppsgd add to sums of clipped "
        "gradients, as a multiple of the clipping norm; replaces --epsilon.",
    )  # fmt: skip
    noise: float = Field(
        default=0.0,
        ge=0,
        description="Standard deviation of the noise that clients add to their updates, as a multiple of --clip.",
    )
    clip: float | None = Field(
        default=None, gt=0,
        description="Norm to which a client clips before it adds noise: with dp-fedavg, centaur and ppsgd the gradient "
        "of each example (by default 0.04), with --noise the whole update (by default 1).",
    )  # fmt: skip
    minimum_steps: int = Field(default=1, ge=1, description="Fewest local steps that a client agrees to train.")
    refuse: bool = Field(default=False, description="Let clients reject a hypernetwork with abnormal weights.")
    statistics: Literal["client", "averaged"] = Field(
        default="client",
        description="Owner of buffers such as running statistics: each client keeps its own, or the server "
        "averages them.",
    )
    lie: Lie | None = Field(
        default=None, description="Simulate malicious clients of this kind; `liars` is their number."
    )
    liars: Annotated[int, Cli(own=False)] = Field(
        default=1, ge=1, description="Number of malicious clients that `lie` simulates."
    )

    def check(self) -> None:
        """Refuse budgets that the method cannot keep, and rounds that cannot have enough updates."""
        super().check()
        sampled = self.sampled(self.clients)
        if self.min_clients > sampled:
            raise UsageError(
                f"A round needs {self.min_clients} valid updates (--min-clients) and asks {sampled} of "
                f"{self.clients} clients.",
                cure=f"Give --min-clients {sampled} or less, or more --clients.",
            )
        entry = entry_of(self.method)
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise UsageError(
                "--epsilon computes the noise that --noise-multiplier gives.", cure="Leave one of the two out."
            )
        if not entry.private and (self.epsilon is not None or self.noise_multiplier is not None):
            given = "--epsilon" if self.epsilon is not None else "--noise-multiplier"
            raise UsageError(
                f"{self.method} adds no noise to gradients, so {given} has no effect.",
                cure="Use --method dp-fedavg, or --noise for noise on whole updates.",
            )
        if entry.private and not entry.has_epsilon and self.noise_multiplier is None:
            raise UsageError(
                f"No ε holds for {self.method}: its head learns from the same examples without noise and steers the "
                "body.",
                cure="Use --method dp-fedavg with --epsilon, or give the noise itself, --noise-multiplier 8.",
            )
        if self.clip is not None and not entry.private and not self.noise:
            raise UsageError(
                f"{self.method} without --noise clips nothing, so --clip has no effect.",
                cure="Leave --clip out, add --noise, or use --method dp-fedavg.",
            )
        self._refuse_options_without_effect()
        if self.clip is not None and entry.private and self.noise:
            raise UsageError(
                f"{self.method} clips the gradients of examples and --noise clips updates; --clip could mean either.",
                cure="Leave out --clip, so that each has its default, or leave out --noise.",
            )

    def _refuse_options_without_effect(self) -> None:
        """Refuse options that change nothing beside the others, and more malicious clients than can be."""
        given = {name for name in ("alpha", "delta", "liars") if getattr(self, name) != _default(name)}
        if "alpha" in given and self.partition != "dirichlet":
            raise UsageError(
                f"--alpha has no effect on the partition {self.partition}.",
                cure="Give --partition dirichlet, or leave --alpha out.",
            )
        if "delta" in given and not entry_of(self.method).private and not self.noise:
            raise UsageError(
                f"{self.method} adds no noise, so --delta has no effect.",
                cure="Leave --delta out, add --noise, or use --method dp-fedavg.",
            )
        if self.refuse and not self.method.startswith("hyperfl"):
            raise UsageError(
                f"{self.method} sends clients no hypernetwork that they could reject.",
                cure="Leave --refuse out, or use --method hyperfl.",
            )
        if "liars" in given and self.lie is None:
            raise UsageError(
                "`liars` has no effect without a kind of malicious clients.", cure="Give --lie, such as --lie scaled."
            )
        if self.lie is not None and self.liars >= self.clients:
            raise UsageError(
                f"{self.liars} of {self.clients} clients would be malicious: no honest one would be left.",
                cure=f"Give --set liars={max(self.clients - 1, 1)} or less, or more --clients.",
            )
        sent = "noise" if self.noise else "lie" if self.lie is not None else ""
        if self.method == "local" and sent:
            raise UsageError(
                f"With the method local, clients send nothing, so --{sent} has no effect.",
                cure=f"Leave --{sent} out, or use --method fedavg.",
            )


def _default(name: str) -> Any:
    return _Request.model_fields[name].get_default(call_default_factory=True)


class FolderFederation(_Request):
    """Settings of a federation in a command or a recipe, which give its data beside them."""

    option_groups: ClassVar = {
        "Clients and data": ("method", "clients", "partition", "alpha", "model"),
        "Rounds": (
            "rounds", "fraction", "seed", "evaluate_every", "drop_out", "min_clients", "retries", "until_plateau",
            "aggregator", "most_norm", "most_examples",
        ),
        "Local training": ("epochs", "batch_size", "lr", "minimum_steps", "statistics"),
        "Privacy": ("epsilon", "delta", "noise_multiplier", "noise", "clip", "refuse"),
        "Malicious clients": ("lie", "liars"),
        "This machine": ("workers", "device"),
        "Audit": ("updates", "search_steps"),
    }  # fmt: skip

    workers: int | None = Field(default=None, ge=1, description="Threads; by default one for each core.")
    device: str = Field(default="cpu", description="Device of the training: cpu or cuda.")
    updates: int = Field(default=5, ge=1, description="Number of updates to attack in each threat model.")
    search_steps: Annotated[int, Cli(own=False)] = Field(
        default=600,
        ge=1,
        description="Steps of the audit's search for a batch of images; `netweight federate audit` uses 4,800.",
    )

    def plan(self, data: str) -> FederationPlan:
        """Return what decides the federation."""
        return FederationPlan(data=data, **{name: getattr(self, name) for name in _Request.model_fields})


@final
class FederationAudit(Settings):
    """Settings of an audit: the updates that are attacked, and the servers that attack."""

    updates: int = Field(default=16, ge=1, description="Number of updates to attack in each threat model.")
    search_steps: int = Field(
        default=4800, ge=1, description="Steps for a batch of images; each of several searches takes a quarter of them."
    )
    threats: Annotated[tuple[str, ...], Cli(name="--threat", metavar="BATCHxSTEPS[xCLIENTS][+WORD]")] = Field(
        default=(),
        description="Threat model: local batch size, local steps and, for a sum, the number of clients; then words "
        "for what the server does: +first (it attacks the first round), +embeddings (it knows the clients' "
        "embeddings), +queries=K (it sends the same weights K times), or +imprint, +thresholds or +fishing (it "
        "is malicious). May be given several times.",
    )
    seed: int = Field(default=0, description="Seed of the choice of images and of the attacks.")
    app: str | None = Field(default=None, description="For a Flower run: the app as MODULE:NAME, such as app:both.")


@final
class FederationReport(Settings):
    """The report of a federation, trained in one process or over Flower."""


@final
class FederationExport(Settings):
    """Settings of the export of a federation's models as state dicts."""

    client: int = Field(
        default=0,
        ge=0,
        description="Client whose model is exported: its personal model. With a method that trains one shared model, "
        "such as fedavg, this is the shared model whichever client is named.",
    )
    private: Annotated[FilePath | None, Cli(metavar="FILE")] = Field(
        default=None,
        description="For a Flower run, whose server does not have what clients keep, such as heads and running "
        "statistics: the client's tensors, written by netweight.plugins.flower.export_private.",
    )
    app: str | None = Field(default=None, description="For a Flower run: the app as MODULE:NAME, such as app:both.")


@final
class FederationPlan(_Request):
    """All that decides a federation; a run's folder keeps it."""

    data: str = Field(default="digits", description="A data set by name, or a folder of images.")

    def images(self) -> Images:
        """Return the data set."""
        from netweight.data.images import NAMES, load, load_folder
        from netweight.data.images.images import refuse_one_class

        if self.data in NAMES:
            if self.size is not None:
                raise UsageError(
                    f"--size brings the pictures of a folder to one size; {self.data} is a data set with a size of its "
                    "own.",
                    cure="Leave --size out, or name a folder of pictures with --data.",
                )
            return self._named_set(load(self.data))
        if Path(self.data).is_dir():
            size = None if self.size is None else parsed_size(self.size)
            images = load_folder(Path(self.data), size=size, fit=self.fit)
            refuse_one_class(Path(self.data), images.classes)
            return images
        raise not_found(f"{self.data!r} is neither a data set nor a folder.", self.data, NAMES)

    def _named_set(self, images: Images) -> Images:
        """Return a data set that was named, with a remark if a folder has the same name."""
        if not Path(self.data).is_dir():
            return images
        remark = (
            f"The data set {self.data} was read, and not the folder {Path(self.data).resolve()}: --data ./{self.data} "
            "reads the folder."
        )
        return replace(images, remarks=(*images.remarks, remark))

    def task(self) -> Task:
        """Return the network and every client's data."""
        from netweight.data.images import crop_and_flip
        from netweight.methods.federate.partition import federated_images
        from netweight.methods.federate.task import Task

        images = self.images()
        body, head = self._network(images)
        parts = federated_images(
            images, clients=self.clients, partition=self.partition, alpha=self.alpha, seed=REFERENCE_SPLIT
        )
        natural = images.shape[0] == 3
        augment = partial(crop_and_flip, fill=images.black) if natural else None
        return Task(body, head, parts, augment=augment, remarks=images.remarks)

    def _network(self, images: Images) -> tuple[nn.Module, nn.Module]:
        import torch
        from torch import nn

        from netweight.core.seeds import derive
        from netweight.methods.federate.small_cnn import SMALL_CNN_SIZES, small_cnn

        channels, height, width = images.shape
        if self.model is not None:
            size = height if height == width else (height, width)
            make = import_named(self.model, "The model")
            # Later commands make the network again, which must then begin with the same numbers.
            with (
                running(f"The network {self.model!r}, called with {channels}, {size} and {len(images.classes)},"),
                torch.random.fork_rng(devices=[]),
            ):
                torch.manual_seed(derive(self.seed, "network"))
                made = make(channels, size, len(images.classes))
            if not isinstance(made, tuple | list) or len(made) != 2 or not all(isinstance(m, nn.Module) for m in made):
                raise UsageError(
                    f"The function {self.model!r} returns {type(made).__name__}, not two modules.",
                    cure="Return body and head, two modules of torch: the head takes what the body returns.",
                )
            return made[0], made[1]
        if height != width or height not in SMALL_CNN_SIZES:
            raise UsageError(
                f"The small CNN takes images of 28 × 28 or 32 × 32 pixels; those of {self.data} have "
                f"{height} × {width}.",
                cure="Give --size 28 or --size 32, or a network of your own with --model.",
            )
        return small_cnn(channels, height, len(images.classes), seed=self.seed)

    def training(self) -> LocalTraining | None:
        """Return how clients train; None for methods whose local training is of another kind."""
        own = entry_of(self.method).training
        if own is None:
            return None
        return own.replace(epochs=self.epochs, batch_size=self.batch_size, lr=own.lr if self.lr is None else self.lr)

    @property
    def budget(self) -> float:
        """ε of a private method whose noise is not given."""
        return DEFAULT_EPSILON if self.epsilon is None else self.epsilon

    def most_answers(self) -> int | None:
        """Return how often a client may answer: as often as its noise was made for, attempts included."""
        return self.rounds if entry_of(self.method).private and self.noise_multiplier is None else None

    def make_method(self, task: Task) -> Method:
        """Return the method, with the protections asked for around it; noise as the budget asks of the schedule.

        Args:
            task: The task that the method is to train, since noise depends on who holds which examples.
        """
        from netweight.methods.federate.acceptance import AcceptanceLimits
        from netweight.methods.federate.malicious_clients import WithMaliciousClients
        from netweight.methods.federate.protections import HardenedMethod, UpdateNoise

        if self.method == "fedbn":
            from netweight.methods.federate.algorithms.fedbn import normalization_layers

            if not normalization_layers(task):
                raise UsageError(
                    "The network has no normalization layers, so fedbn is the same as fedavg.",
                    cure="Use --method fedavg, or a network with normalization layers, --model MODULE:FUNCTION.",
                )
        noise = self.noise_multiplier
        if entry_of(self.method).private:
            from netweight.methods.federate.accounting import check_delta

            check_delta(self.delta, max(task.client(client).n for client in task.clients))
        if entry_of(self.method).private and noise is None:
            from netweight.methods.federate.task_privacy import noise_for_task

            noise = noise_for_task(
                task, self.budget, self.delta, batch_size=self.batch_size, epochs=self.epochs * self.rounds
            )
        method = named_method(
            self.method, training=self.training(), noise_multiplier=noise,
            clip=self.clip if entry_of(self.method).private else None,
        )  # fmt: skip
        if self.statistics == "averaged":
            from netweight.methods.federate.algorithms.averaged_statistics import AveragedStatistics

            method = AveragedStatistics(method)
        if self.minimum_steps > 1:
            self._refuse_minimum_of_steps(task)
        if self.noise or self.refuse or self.minimum_steps > 1:
            # A clip beside a private method is refused, so that here it is that of the update.
            added = UpdateNoise(self.clip or _UPDATE_CLIP, self.noise) if self.noise else None
            method = HardenedMethod(method, added, self.minimum_steps, AcceptanceLimits() if self.refuse else None)
        if self.lie is None:
            return method
        # Rules that shorten or sort leave nothing to gain from length; the others allow nearly `most_norm`.
        bounded = self.aggregator.bounds_to_median or self.aggregator.compares_values
        reach = 1.0 if bounded else 0.95 * self.most_norm
        return WithMaliciousClients(method, self.lie, task.clients[-self.liars :], reach)

    def _refuse_minimum_of_steps(self, task: Task) -> None:
        """Refuse a least number of local steps that no client reaches."""
        from netweight.methods.federate.local import steps_per_epoch

        training = self.training()
        if training is None:
            raise UsageError(
                f"{self.method} does not train in epochs, so its local steps cannot be counted.",
                cure="Leave --minimum-steps out.",
            )
        needs_two = task.habits.needs_two
        most = training.epochs * max(
            steps_per_epoch(task.client(client).n, training.batch_size, needs_two=needs_two) for client in task.clients
        )
        if most < self.minimum_steps:
            raise UsageError(
                f"Clients would train at most {most} local steps, fewer than the {self.minimum_steps} of "
                "--minimum-steps, so that none would take part.",
                cure=f"Give --minimum-steps {most} or less, more --epochs, or a smaller --batch-size.",
            )

    def save(self, folder: Path) -> None:
        """Write the settings into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(folder / PLAN_FILE, overwrite=True) as file:
            file.write((json.dumps(self.to_json(), indent=2) + "\n").encode())

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the settings of a run."""
        path = folder / PLAN_FILE
        if not path.is_file():
            raise UsageError(
                f"{folder} contains no federation: there is no {PLAN_FILE}.", cure="Make one: netweight federate run."
            )
        return cls.of(json.loads(path.read_text()))

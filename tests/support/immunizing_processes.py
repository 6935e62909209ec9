"""Two processes immunize a model together, and each checks that the result is that of one; a program of its own.

Usage: immunizing_processes.py FOLDER CHECK..., with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment.
"""

import dataclasses
import sys
import warnings
from pathlib import Path

import pytest
import torch
from decoders_under_test import SHORT, decoder, some_pairs
from repnoise_in_one_graph import repnoise_loss
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainingArguments

from netweight.core.digests import digest_tensor
from netweight.core.seeds import torch_generator
from netweight.data.tokens import Example
from netweight.errors import OutputFailed, TrainingStopped, Unsupported, UsageError
from netweight.methods.immunize import train as training
from netweight.methods.immunize.defenses.latent_adversarial import LatentAdversarial
from netweight.methods.immunize.defenses.repnoise import RepNoise
from netweight.methods.immunize.defenses.rmu import RMU
from netweight.methods.immunize.defenses.self_destruction import SelfDestruction
from netweight.methods.immunize.defenses.tar import TAR
from netweight.methods.immunize.pairs import collate_pairs
from netweight.methods.immunize.record import RECORD
from netweight.methods.immunize.train import CHECKPOINT, immunize
from netweight.plugins.immunize_trainer import ImmunizeTrainer

PAIRS = some_pairs(9)  # the last batch of four is one pair, so that one process has none
KEPT = [Example((1, 2), (5, 6, 7)), Example((3,), (8, 9)), Example((4, 4), (9,))]
FEW = SHORT.replace(epochs=2, measure_every=4)
ONCE = FEW.replace(epochs=1, measure_every=2)


def replicated(model):
    return DistributedDataParallel(model)


def sharded(model, **root):
    blocks = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    for block in blocks:
        fully_shard(block)
    return fully_shard(model, **root)


def sharded_throughout(model):
    """Root and head give their weights back after the forward pass, too."""
    fully_shard(model.lm_head)
    return sharded(model, reshard_after_forward=True)


def weights(model):
    model = model.module if isinstance(model, DistributedDataParallel) else model
    found = {name: value.detach() for name, value in model.named_parameters()}
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}


def undropped(family):
    """A model without dropout, since which rows are dropped out depends on who has them; in float64."""
    model = decoder(family).double()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def assert_same(spread, alone, records):
    """Compare all weights with `alone`, to a thousandth of a step, and every term, weight and norm of both records."""
    gathered = weights(spread)
    for name, value in alone.items():
        torch.testing.assert_close(gathered[name], value, rtol=0, atol=1e-3 * FEW.lr)
    for ours, theirs in zip(records[0].steps, records[1].steps, strict=True):
        assert ours.norm == pytest.approx(theirs.norm, rel=1e-4)
        assert ours.terms.keys() == theirs.terms.keys()
        for name, term in ours.terms.items():
            other = theirs.terms[name]
            assert (term.norm is None) == (other.norm is None)
            found, expected = ([one.value, one.weight, one.norm or 0.0] for one in (term, other))
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-6), f"{name} at step {ours.step}"


SMALL = RepNoise(noise_tokens=6, lens_layers=2, alpha=0.7, beta=0.4)
CASES = (
    ("llama", SMALL, (replicated, sharded, sharded_throughout)),
    ("gpt2", RepNoise(), (replicated, sharded)),  # with tied weights
    ("llama", RepNoise(norms=0.5), (replicated,)),
    ("llama", "repnoise-reference", (sharded,)),
    ("llama", "vaccine", (sharded,)),
    ("llama", "t-vaccine", (sharded,)),
    ("llama", LatentAdversarial(search_steps=2, bound=0.1), (replicated,)),
    ("llama", SelfDestruction(distance=1e-2), (replicated,)),
    ("llama", "adversarial-loss", (sharded,)),
    ("llama", "security-vectors", (replicated,)),
    ("llama", RMU(alpha=2.0), (replicated,)),
    ("llama", "booster", (replicated,)),
    ("llama", TAR(attack_steps=3, look_every=2, attack_lr=1e-3), (replicated,)),
    ("llama", "random-weights", (sharded,)),
)


def made_once(rank, make):
    """Return to all processes what the first one makes."""
    made = [make() if rank == 0 else None]
    torch.distributed.broadcast_object_list(made)
    return made[0]


def the_result_is_that_of_one_process(rank, folder):
    pairs = PAIRS[-5:]  # a whole batch, and one of a single pair
    for family, defense, ways in CASES:

        def trained_alone(family=family, defense=defense):
            alone = undropped(family)
            return immunize(alone, pairs, KEPT, defense=defense, settings=ONCE), weights(alone)

        expected, alone = made_once(rank, trained_alone)
        for spread in ways:
            print(family, spread.__name__, expected.defense, flush=True)  # so that a failure says of what
            model = spread(undropped(family))
            record = immunize(model, pairs, KEPT, defense=defense, settings=ONCE)
            assert record.environment["processes"] == 2
            assert (record.trained, record.digests["before"]) == (expected.trained, expected.digests["before"])
            assert_same(model, alone, (record, expected))


def narrow_weights_are_stepped_in_float32(rank, folder):
    alone, model = decoder().bfloat16(), sharded(decoder().bfloat16())
    settings = FEW.replace(epochs=1)
    records = [immunize(one, PAIRS, KEPT, settings=settings) for one in (model, alone)]
    for name, term in records[0].steps[0].terms.items():
        assert term.value == pytest.approx(records[1].steps[0].terms[name].value, rel=0.02, abs=0.02)
    assert all(value.dtype == torch.bfloat16 for value in model.parameters())


def the_first_process_keeps_a_checkpoint_for_all(rank, folder):
    """A training that ends early goes on to the same bits, sharded, and to the same numbers in one process."""
    settings = FEW.replace(checkpoint_every=2)
    arguments = {"defense": "repnoise", "settings": settings}
    whole = sharded(decoder("gpt2"))  # with dropout
    record = immunize(whole, PAIRS, KEPT, **arguments)
    step, taken = training._Training._step, []

    def ending(self):
        taken.append(1)
        if len(taken) == 4:
            raise KeyboardInterrupt
        return step(self)

    training._Training._step = ending
    with pytest.raises(KeyboardInterrupt):
        immunize(sharded(decoder("gpt2")), PAIRS, KEPT, folder=folder, **arguments)
    training._Training._step = step
    held = {"job.lock"}  # the first process may still be about to let go of it
    assert {path.name for path in folder.iterdir()} - held == {CHECKPOINT}
    early = (folder / CHECKPOINT).read_bytes()

    resumed = sharded(decoder("gpt2"))
    torch.manual_seed(99)
    again = immunize(resumed, PAIRS, KEPT, folder=folder, **arguments)
    assert again == record
    gathered = weights(resumed)
    for name, value in weights(whole).items():
        assert digest_tensor(gathered[name]) == digest_tensor(value)
    assert {path.name for path in folder.iterdir()} - held == {CHECKPOINT, RECORD}
    with pytest.raises(UsageError, match="other settings: settings"):
        immunize(sharded(decoder("gpt2")), PAIRS, KEPT, folder=folder, settings=FEW)
    blocked = folder / "blocked"
    if rank == 0:
        (blocked / f".{CHECKPOINT}.netweight-part").mkdir(parents=True)
    with pytest.raises(OutputFailed, match="could not be written"):
        immunize(sharded(decoder("gpt2")), PAIRS, KEPT, folder=blocked, **arguments)

    own = folder / f"process-{rank}"
    own.mkdir()
    (own / CHECKPOINT).write_bytes(early)
    plain = decoder("gpt2")
    immunize(plain, PAIRS, KEPT, folder=own, **arguments)
    assert len(training.Record.read(own / RECORD).steps) == len(record.steps)


def what_is_wrong_is_said_by_all(rank, folder):
    mine = PAIRS if rank == 0 else PAIRS[:-1]
    with pytest.raises(UsageError, match="Process 1 was given another model, defense, data"):
        immunize(sharded(decoder()), mine, settings=FEW)
    model = sharded(decoder())
    weight = model.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        weight.to_local().view(-1)[rank] = float("nan") if rank else 0.0
    with pytest.raises(UsageError, match=r"'model.layers.1.mlp.up_proj.weight' contains NaN"):  # in process 1
        immunize(model, PAIRS, settings=FEW)
    with pytest.raises(TrainingStopped, match=r"is (nan|inf)"):
        immunize(sharded(decoder()), PAIRS, settings=FEW.replace(lr=1e30))
    with pytest.raises(Unsupported, match="cannot be added to sharded weights"):
        immunize(sharded(decoder()), PAIRS, defense="security-vectors", settings=FEW)
    with pytest.raises(Unsupported, match="Norms cannot be bounded where weights are sharded"):
        immunize(sharded(decoder()), PAIRS, defense=RepNoise(norms=2.0), settings=FEW)
    for name in ("distillation", "rmu", "booster", "tar", "circuit-breaking", "self-destruction"):
        with pytest.raises(Unsupported, match=f"{name} copies weights, which is not possible if they are sharded"):
            immunize(sharded(decoder()), PAIRS, defense=name, settings=FEW)
    inner = decoder()
    inner.model = DistributedDataParallel(inner.model)
    with pytest.raises(Unsupported, match="DistributedDataParallel at 'model'"):
        immunize(inner, PAIRS, settings=FEW)
    with pytest.raises(Unsupported, match="a DataParallel around the model"):
        immunize(torch.nn.DataParallel(decoder()), PAIRS, settings=FEW)
    some = decoder()
    fully_shard(some.model.layers[0])
    with pytest.raises(Unsupported, match="not by fully_shard on the whole model"):
        immunize(some, PAIRS, settings=FEW)
    one = torch.distributed.init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "parts"))
    with pytest.raises(Unsupported, match="several meshes"):
        immunize(fully_shard(decoder(), mesh=one), PAIRS, settings=FEW)


def the_trainer_steps_as_one_process(rank, folder):
    """Plain descent under accelerate, two rows here and two there, against the whole batches in one graph."""
    config, pairs, rate = RepNoise(noise_tokens=12, beta=0.4), some_pairs(8), 0.05
    options = {"learning_rate": rate, "optim": "sgd", "max_grad_norm": 0.0, "weight_decay": 0.0, "warmup_steps": 0}
    run = ImmunizeTrainer(
        decoder(),
        TrainingArguments(
            str(folder), per_device_train_batch_size=2, max_steps=2, lr_scheduler_type="constant", logging_steps=1,
            train_sampling_strategy="sequential", use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
            **options,
        ),
        defense=config, pad_id=0, train_dataset=[dataclasses.asdict(pair) for pair in pairs],
    )  # fmt: skip
    run.train()
    plain, weight = decoder().train(), None
    for update in range(2):
        batch = collate_pairs(pairs[4 * update : 4 * update + 4], pad_id=0)
        generator = torch_generator(run.args.seed, "noise", update)
        parts = repnoise_loss(plain, batch, config, generator=generator, noise_weight=weight)
        plain.zero_grad()
        parts.total.backward()
        with torch.no_grad():
            for value in plain.parameters():
                value -= rate * value.grad
        weight = parts.noise_weight
        if rank == 0:
            (logged,) = [entry for entry in run.state.log_history if "loss" in entry and entry["step"] == update + 1]
            for name in ("harmless", "noise", "ascent", "noise_weight"):
                expected = getattr(parts, name)
                expected = expected if isinstance(expected, float) else expected.detach().item()
                assert logged[name] == pytest.approx(expected, rel=1e-3), name
            assert logged["loss"] == pytest.approx(parts.total.detach().item(), rel=1e-3)
    gathered = weights(run.model)
    for name, value in plain.named_parameters():
        torch.testing.assert_close(gathered[name], value.detach(), rtol=1e-3, atol=1e-5)


def main(folder, *checks):
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # Of logits that transformers cut out of a larger tensor, in which nobody writes.
    warnings.filterwarnings("ignore", ".*returned a view tensor", UserWarning)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    for check in checks:
        place = Path(folder) / check
        place.mkdir(exist_ok=True)
        globals()[check](rank, place)
        print(check, flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

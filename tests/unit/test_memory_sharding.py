"""Compressed weights under FSDP2 in two processes: bit for bit as dense ones, fewer bytes gathered, limits by name."""

import os

import pytest
import torch
import warm
from models_under_test import Tied, bits, pair, same, stack
from torch import nn
from torch.distributed.checkpoint import state_dict as sharded_state
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import netweight
from netweight import CompressedTensor, LayerwiseOptimizer
from netweight.errors import LayerwiseConflict, Unsupported

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class CountingGather:
    """FSDP's gather as it is by default, and what each process sends by it."""

    def __init__(self):
        self.sent = []

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.sent.append(input_tensor.nbytes)
        return torch.distributed.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class Recomputed(nn.Module):
    """Layers whose activations are computed again going backward."""

    def __init__(self):
        super().__init__()
        self.layers = stack()

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def frozen_stack():
    """Biases train; weights stay as they are."""
    layers = stack()
    for layer in layers:
        layer.weight.requires_grad_(False)
    return layers


def mesh():
    return torch.distributed.init_device_mesh("cpu", (2,))


def shard(model, **options):
    """Every layer with a weight of its own in a group, the rest in another; returns what counts their gathers."""
    counting = CountingGather()
    options.setdefault("mesh", mesh())
    for module in [m for m in model.modules() if isinstance(m, nn.Linear) and m is not getattr(model, "head", None)]:
        fully_shard(module, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(counting)
    return counting


def trained(model, inputs, optimizer=None, steps=3):
    """Losses and norms of some steps."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.05)
    seen = []
    for _ in range(steps):
        loss = model(inputs).float().square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        seen += [loss.item(), norm.full_tensor().item()]
    return seen


def whole(model):
    return [p.full_tensor() for p in model.parameters()]


def agree(one, other):
    return all(map(same, whole(one), whole(other)))


def part(parameter):
    return parameter.to_local().detach()


def numbers(dtype, width, rank):
    return torch.randn(3, width, generator=torch.Generator().manual_seed(rank)).to(dtype)


def words(rank):
    return torch.randint(0, 300, (3, 7), generator=torch.Generator().manual_seed(rank))


def trains_as_plain_fsdp(rank):
    def momentum(parameters):
        return torch.optim.SGD(parameters, lr=1.0, momentum=0.9, foreach=False)

    def adam(parameters):
        return torch.optim.AdamW(parameters, lr=0.05)

    for make, dtype, inputs, optimizer, options in (
        (stack, torch.bfloat16, numbers(torch.bfloat16, 64, rank), adam, {}),
        (lambda: stack(width=65), torch.float32, numbers(torch.float32, 65, rank), momentum, {}),
        (lambda: stack(width=65), torch.float32, numbers(torch.float32, 65, rank), adam, {"mp_policy": HALF}),
        (Recomputed, torch.float16, numbers(torch.float16, 64, rank), momentum, {}),
        (lambda: Tied(301), torch.bfloat16, words(rank), adam, {"reshard_after_forward": True}),
        (lambda: Tied(301), torch.float32, words(rank), adam, {"reshard_after_forward": False, "mp_policy": HALF}),
        (frozen_stack, torch.bfloat16, numbers(torch.bfloat16, 64, rank), adam, {}),
        (stack, torch.float32, numbers(torch.float32, 64, rank), adam, {"offload_policy": CPUOffloadPolicy(False)}),
    ):
        dense, model = pair(make, dtype)
        compressed = sum(isinstance(p, CompressedTensor) for p in model.parameters())
        for m in (dense, model):
            shard(m, **options)
        one, other = (trained(m, inputs, optimizer(m.parameters())) for m in (dense, model))
        assert one == other
        assert agree(dense, model)
        assert sum(isinstance(part(p), CompressedTensor) for p in model.parameters()) == compressed


def replicas_of_shards(rank):
    replicated = torch.distributed.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    dense, model = pair(stack, torch.bfloat16)
    for m in (dense, model):
        shard(m, mesh=replicated)
    inputs = numbers(torch.bfloat16, 64, rank)
    assert trained(dense, inputs) == trained(model, inputs)
    assert agree(dense, model)


def few_rows_and_ignored_weights(rank):
    def make():
        return nn.Sequential(nn.Linear(300, 1), nn.Linear(1, 300), nn.Linear(300, 64))

    dense, model = pair(make, torch.bfloat16)
    model[0].weight = nn.Parameter(CompressedTensor.of(dense[0].weight.data))  # compress_ finds that it does not pay
    for m in (dense, model):
        fully_shard(m, mesh=mesh(), ignored_params={m[2].weight})
    inputs = numbers(torch.bfloat16, 300, rank)
    for m in (dense, model):
        m(inputs).sum().backward()
        torch.optim.SGD(m.parameters(), lr=0.1, foreach=False).step()
    assert isinstance(model[2].weight, CompressedTensor)
    assert same(part(dense[0].weight), part(model[0].weight).dense())
    assert part(model[0].weight).shape == (1 - rank, 300)  # one process has all rows, the other none
    assert same(dense[2].weight, model[2].weight.detach().dense())


def fewer_bytes_are_gathered(rank):
    def make():
        layers = stack(layers=3, width=512)
        for p in layers.parameters():
            nn.init.normal_(p, std=0.02)
        return layers

    dense, model = pair(make, torch.bfloat16)
    sent = [shard(m).sent for m in (dense, model)]
    inputs = numbers(torch.bfloat16, 512, rank)
    for m in (dense, model):
        trained(m, inputs, torch.optim.AdamW(m.parameters(), lr=1e-4))
    assert len(sent[0]) == len(sent[1]) == 18  # three groups, in each step forward and backward
    assert sent[1][:6] == sent[1][6:12] == sent[1][12:]  # capacities that stay
    assert sum(sent[1]) / sum(sent[0]) <= 0.72
    both = [None, None]
    torch.distributed.all_gather_object(both, sent[1])
    assert both[0] == both[1]


def outgrown_capacities(rank):
    """One process's weights change from zeros to noise, which fits nowhere, before or between two gathers."""

    def noise(model):
        if rank:
            for p in model.parameters():
                seen = torch.randint(0, 2**15, part(p).shape, generator=torch.Generator().manual_seed(5))
                values = seen.to(torch.int16).view(torch.bfloat16)
                part(p).copy_(values.where(values.isfinite(), 0).clamp(-1, 1))

    inputs = numbers(torch.bfloat16, 65, rank)
    for between in (False, True):
        results = []
        dense, model = pair(lambda: stack(width=65), torch.bfloat16)
        for m in (dense, model):
            with torch.no_grad():
                [p.mul_(0) for p in m.parameters()]
            sent = shard(m, reshard_after_forward=True).sent
            seen = [m(inputs)]
            with torch.no_grad():
                between or noise(m)
                seen.append(m(inputs) if not between else seen[0])
            loss = m(inputs).float().sum()
            if between:
                with torch.no_grad():
                    noise(m)
            loss.backward()
            seen += [m(inputs), loss, *(p.grad.full_tensor() for p in m.parameters()), *whole(m)]
            results.append(seen)
        assert all(map(same, *results))
        assert 3 * sent[0] < sent[-1] == max(sent), sent  # once they are known, the new lengths fit into one gather


def slowly_growing_weights(rank):
    """A capacity is enlarged in time: no gather needs a second one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512, bias=False))
    nn.init.normal_(model[0].weight, std=0.02)
    model.to(torch.bfloat16)
    netweight.compress_(model)
    sent = shard(model, reshard_after_forward=True).sent
    inputs, second = numbers(torch.bfloat16, 512, rank), []
    gather = torch.distributed.all_gather
    torch.distributed.all_gather = lambda *arguments, **options: second.append(gather(*arguments, **options))
    try:
        with torch.no_grad():
            for step in range(16):
                model(inputs)
                if rank:
                    noise = torch.randint(-(2**15), 2**15, (64,)).to(torch.int16).view(torch.bfloat16)
                    part(model[0].weight)[step, :64] = noise
    finally:
        torch.distributed.all_gather = gather
    assert sent == sorted(sent)
    assert 1 < len(set(sent)) < 6
    assert not second


def inference_mode(rank):
    """torch's buffers cannot be enlarged then: what does not fit goes the other way each time."""
    inputs = numbers(torch.bfloat16, 65, rank)
    results = []
    for m in pair(lambda: stack(width=65), torch.bfloat16):
        values = [p.detach().clone() for p in m.parameters()]
        values = [v.dense() if isinstance(v, CompressedTensor) else v for v in values]
        with torch.no_grad():
            [p.zero_() for p in m.parameters()]
        shard(m, reshard_after_forward=True)
        with torch.inference_mode():
            seen = [m(inputs)]
            for p, value in zip(m.parameters(), values, strict=True):
                part(p).copy_(value.chunk(2)[rank])
            seen += [m(inputs), m(inputs)]
        results.append(seen)
    assert all(map(same, *results))
    assert not same(*results[0][:2])


def states_are_assigned(rank):
    """Shards of other lengths take the place of those for which capacities were agreed."""
    inputs = numbers(torch.bfloat16, 65, rank)
    dense, model = pair(lambda: stack(width=65), torch.bfloat16)
    for m in (dense, model):
        shard(m)
        trained(m, inputs, steps=1)
    empty = pair(lambda: stack(width=65), torch.bfloat16)
    for m in empty:
        with torch.no_grad():
            [p.zero_() for p in m.parameters()]
        shard(m)
    full = [{name: value.clone() for name, value in m.state_dict().items()} for m in (dense, model)]
    for states in ([m.state_dict() for m in empty], full):
        for m, state in zip((dense, model), states, strict=True):
            m.load_state_dict(state, assign=True)
        assert all(isinstance(part(layer.weight), CompressedTensor) for layer in model)
        assert same(dense(inputs), model(inputs))
        assert trained(dense, inputs, steps=2) == trained(model, inputs, steps=2)
        assert agree(dense, model)


def dense_weights_come_and_go(rank):
    _, model = pair(lambda: stack(width=256), torch.float32)
    netweight.decompress_(model, include="3")
    before, second = netweight.memory_footprint(model), model[1].weight.detach().dense()
    shard(model)
    held = netweight.memory_footprint(model)
    assert 0.45 * before < held < 0.55 * before
    model[0].unshard()
    gathered = model[0].weight
    assert type(gathered) is nn.Parameter
    assert gathered.untyped_storage().nbytes() == gathered.nbytes
    assert netweight.memory_footprint(model) > held + gathered.nbytes / 2
    model[0].reshard()
    assert gathered.untyped_storage().nbytes() == 0
    assert netweight.memory_footprint(model) == held
    model[1].unshard(async_op=True).wait()
    assert same(model[1].weight, second)


def states_can_be_saved(rank, folder):
    inputs = words(rank)
    dense, model = pair(lambda: Tied(301))
    optimizers = {}
    for m in (dense, model):
        shard(m)
        optimizers[m] = torch.optim.AdamW(m.parameters(), lr=0.05)
        trained(m, inputs, optimizers[m])
        state, states = sharded_state.get_state_dict(m, optimizers[m])
        place = f"{folder}/{'compressed' if m is model else 'dense'}"
        torch.distributed.checkpoint.save({"model": state, "optimizer": states}, checkpoint_id=place)
    full = sharded_state.StateDictOptions(full_state_dict=True)
    one, other = (sharded_state.get_model_state_dict(m, options=full) for m in (dense, model))
    assert all(type(value) is torch.Tensor and same(value, one[name]) for name, value in other.items())
    for name, value in netweight.dense_state_dict(model).items():
        assert not isinstance(value.to_local(), CompressedTensor)
        assert same(value.full_tensor(), one[name])
    for saved, which in (("compressed", 0), ("dense", 1), ("compressed", 1)):
        again = pair(lambda: Tied(301), seed=7)[which]
        shard(again)
        optimizer = torch.optim.AdamW(again.parameters(), lr=0.05)
        state, states = sharded_state.get_state_dict(again, optimizer)
        both = {"model": state, "optimizer": states}
        torch.distributed.checkpoint.load(both, checkpoint_id=f"{folder}/{saved}")
        sharded_state.set_state_dict(again, optimizer, model_state_dict=both["model"], optim_state_dict=states)
        assert agree(again, dense)
        losses = trained(again, inputs, optimizer, steps=1)
        assert losses[0] == dense(inputs).square().mean().item()
        dense.reshard()
    sharded_state.set_model_state_dict(again, one, options=full)
    assert agree(again, dense)
    torch.save(model.state_dict(), f"{folder}/part{rank}")
    assert os.path.getsize(f"{folder}/part{rank}") < sum(part(p).nbytes for p in dense.parameters())
    again.load_state_dict(torch.load(f"{folder}/part{rank}", weights_only=True), assign=True)
    assert agree(again, dense)
    assert same(again(inputs), model(inputs))


def conversions_before_training(rank):
    dense, model = pair(lambda: stack(width=65))
    inputs = numbers(torch.bfloat16, 65, rank)
    for m in (dense, model):
        shard(m)
        m.to(torch.bfloat16)
    assert trained(dense, inputs) == trained(model, inputs)
    assert agree(dense, model)
    assert sum(isinstance(part(p), CompressedTensor) for p in model.parameters()) == 4


def what_is_refused(rank):
    rounded = pair(stack, torch.bfloat16, mantissa_bits=3)[1]
    with pytest.raises(Unsupported, match=r"stored rounded.*without mantissa_bits"):
        fully_shard(rounded, mesh=mesh())
    with pytest.raises(Unsupported, match=r"by rows only.*shard_placement_fn"):
        fully_shard(pair(stack)[1], mesh=mesh(), shard_placement_fn=lambda p: Shard(p.dim() - 1))
    with pytest.raises(Unsupported, match="pin_memory=False"):
        fully_shard(pair(stack)[1], mesh=mesh(), offload_policy=CPUOffloadPolicy())
    model = pair(stack)[1]
    fully_shard(model, mesh=mesh())
    before = [bits(value) for value in whole(model)]
    with pytest.raises(Unsupported, match=r"0\.weight is a shard.*dense_state_dict"):
        netweight.decompress_(model)
    with pytest.raises(Unsupported, match="compress_ goes before fully_shard"):
        netweight.compress_(model)
    with pytest.raises(LayerwiseConflict, match="ordinary torch optimizer"):
        LayerwiseOptimizer(model, torch.optim.SGD, lr=0.1, reduce=lambda gradient: None)
    with pytest.raises(Unsupported, match=r"torch\.distributed\.checkpoint"):
        netweight.save_checkpoint("nowhere", model)
    with pytest.raises(Unsupported, match=r"torch\.distributed\.checkpoint"):
        netweight.load_checkpoint("nowhere", model)
    assert all(map(torch.equal, before, [bits(value) for value in whole(model)]))


CHECKS = (
    trains_as_plain_fsdp,
    replicas_of_shards,
    few_rows_and_ignored_weights,
    fewer_bytes_are_gathered,
    outgrown_capacities,
    slowly_growing_weights,
    inference_mode,
    states_are_assigned,
    dense_weights_come_and_go,
    conversions_before_training,
    what_is_refused,
)


def _process(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    for check in CHECKS:
        check(rank)
    states_can_be_saved(rank, folder)
    torch.distributed.destroy_process_group()


def test_two_processes(tmp_path):
    """All checks in one pair of processes, since starting them takes longer than all checks; a traceback names one."""
    warm.run_in_ranks(__file__, "_process", tmp_path)


def test_resharding_to_fewer_processes_is_refused():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        four = torch.distributed.init_device_mesh("cpu", (4,))
        model = fully_shard(pair(stack)[1], mesh=four, reshard_after_forward=2)
        with pytest.raises(Unsupported, match="reshard_after_forward=True or False"):
            model(numbers(torch.float32, 64, 0))
        fully_shard(pair(stack)[1], mesh=four, reshard_after_forward=4)  # as many as there are: the same as True
    finally:
        torch.distributed.destroy_process_group()

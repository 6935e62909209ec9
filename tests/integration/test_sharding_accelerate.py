"""accelerate's preparation for FSDP2 takes compressed weights: run on the CPU, where accelerate must be told so."""

import os

import pytest
import torch
import warm
from models_under_test import pair, same, stack

pytest.importorskip("accelerate", reason="accelerate is not installed")
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")


def accelerator_of(plugin_options):
    """An accelerator that believes in FSDP2 on the CPU; by itself it would shard on accelerators only."""
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    accelerator = Accelerator(cpu=True)
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=100, **plugin_options
    )
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    assert accelerator.is_fsdp2
    return accelerator


def trained(accelerator, model, rank):
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    inputs = torch.randn(3, 64, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16)
    losses = []
    for _ in range(3):
        loss = model(inputs).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.free_memory()
    return losses


def _process(rank, folder):
    import netweight
    from netweight.errors import Unsupported

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", ACCELERATE_USE_CPU="true")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # asked for, not used: the processes have met
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    accelerator = accelerator_of({"cpu_ram_efficient_loading": False})
    dense, model = pair(stack, torch.bfloat16)
    assert trained(accelerator, dense, rank) == trained(accelerator, model, rank)
    assert all(
        same(p.full_tensor(), q.full_tensor()) for p, q in zip(dense.parameters(), model.parameters(), strict=True)
    )
    assert sum(isinstance(p.to_local(), netweight.CompressedTensor) for p in model.parameters()) == 4
    _, model = pair(stack, torch.bfloat16)
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    with pytest.raises(Unsupported, match="fsdp_cpu_ram_efficient_loading to false"):  # what that mode does
        torch.distributed.tensor.distribute_tensor(model[0].weight.data, mesh)
    values = model[0].weight.data.to(torch.float32)
    model[0].weight.data = values  # what mixed precision does to bf16 weights
    assert isinstance(model[0].weight, netweight.CompressedTensor)
    assert same(model[0].weight, values)
    torch.distributed.destroy_process_group()


def test_two_processes(tmp_path):
    warm.run_in_ranks(__file__, "_process", tmp_path)

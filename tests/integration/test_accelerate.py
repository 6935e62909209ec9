"""The example under accelerate, in one process and in two: it trains what averaged gradients train, to the last bit.

Launchers start each process anew, which takes longest by far: they are studies.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import warm

pytest.importorskip("accelerate", reason="accelerate is in the llm extra")
pytest.importorskip("transformers", reason="transformers is in the llm extra")

import netweight
from netweight.data.tokens import collate
from netweight.toys.language import cipher_world

PROGRAM = Path(__file__).parents[2] / "examples" / "compress" / "accelerated.py"
ONE = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1",
       "--mixed_precision", "no", "--dynamo_backend", "no")  # fmt: skip
TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def launched(folder, launcher):
    """Run the example by a launcher; what it says."""
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    answer = subprocess.run(
        [sys.executable, *launcher, str(PROGRAM), str(folder)],
        env=os.environ | paths | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def met(folder):
    """Run the example in two processes with the variables that launchers set; what it says."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    return "".join(out for out, _ in warm.run_ranks(PROGRAM, folder, env=environment))


def expected(processes):
    """The dense model after steps on the average of the gradients of as many batches."""
    world = cipher_world()
    model, examples = world.base().train(), world.examples("new", 48, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for first in range(0, len(examples), 4 * processes):
        sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for place in range(first, first + 4 * processes, 4):
            model.zero_grad()
            model(**vars(collate(examples[place : place + 4], pad_id=0))).loss.backward()
            for total, parameter in zip(sums, model.parameters(), strict=True):
                total += parameter.grad * (1 / processes)
        for total, parameter in zip(sums, model.parameters(), strict=True):
            parameter.grad = total
        optimizer.step()
    return model


@pytest.mark.parametrize(
    ("run", "processes"),
    [
        pytest.param(lambda folder: launched(folder, ONE), 1, id="accelerate launch", marks=pytest.mark.study),
        pytest.param(lambda folder: launched(folder, TWO), 2, id="torchrun", marks=pytest.mark.study),
        pytest.param(met, 2, id="two processes"),
    ],
)
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")
def test_what_is_trained_is_what_averaged_gradients_train(tmp_path, run, processes):
    assert f"{12 // processes} steps, loss " in run(tmp_path)
    model = cipher_world().base()
    netweight.compress_(model)
    optimizer = netweight.LayerwiseOptimizer(model, torch.optim.AdamW, lr=1e-3)
    netweight.load_checkpoint(tmp_path / "training.safetensors", model, optimizer)
    optimizer.close()
    netweight.decompress_(model)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        dense = expected(processes).state_dict()
    finally:
        torch.set_num_threads(threads)
    differ = [name for name, value in model.state_dict().items() if not torch.equal(value, dense[name])]
    assert differ == []

"""Immunization in two processes, by DDP, FSDP2 and accelerate, on the CPU."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

PROGRAM = Path(__file__).parents[1] / "support" / "immunizing_processes.py"
CHECKS = (
    "the_result_is_that_of_one_process",
    "narrow_weights_are_stepped_in_float32",
    "the_first_process_keeps_a_checkpoint_for_all",
    "what_is_wrong_is_said_by_all",
    "the_trainer_steps_as_one_process",
)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")
def test_two_processes(tmp_path):
    """All checks in one pair of processes, since starting them takes longest; what they say names what fails."""
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, str(PROGRAM), str(tmp_path), *CHECKS]
    processes, logs = [], []
    for rank in ("0", "1"):
        with open(tmp_path / f"log-{rank}", "w") as log:
            own = {**environment, "RANK": rank, "LOCAL_RANK": rank}
            processes.append(subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=500) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        logs = [(tmp_path / f"log-{rank}").read_text() for rank in ("0", "1")]
    assert codes == [0, 0], "\n".join(logs)
    assert all(check in log.splitlines() for check in CHECKS for log in logs)

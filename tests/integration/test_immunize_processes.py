"""Immunization in two processes, by DDP, FSDP2 and accelerate, on the CPU."""

import os
from pathlib import Path

import pytest
import torch
import warm

pytest.importorskip("transformers", reason="transformers is not installed")

PROGRAM = Path(__file__).parents[1] / "support" / "immunizing_processes.py"
CHECKS = (
    "the_result_is_that_of_one_process",
    "narrow_weights_are_stepped_in_float32",
    "the_first_process_keeps_a_checkpoint_for_all",
    "what_is_wrong_is_said_by_all",
    "the_trainer_steps_as_one_process",
)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")
def test_two_processes(tmp_path):
    """All checks in one pair of processes, since starting them takes longest; what they say names what fails."""
    said = warm.run_ranks(PROGRAM, tmp_path, *CHECKS, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=500)
    assert all(check in out.splitlines() for check in CHECKS for out, _ in said)

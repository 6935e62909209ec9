"""A training run for `test_training_interrupted.py`: saves every step, resumes from what is there."""

import sys
from pathlib import Path

import torch
from models_under_test import Tied, bits

import netweight
from netweight.core.digests import digest_bytes


def main(path, steps):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Tied().bfloat16()
    netweight.compress_(model)
    optimizer = netweight.LayerwiseOptimizer(model, torch.optim.AdamW, lr=0.01, stochastic_rounding=True, seed=3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    done = 0
    if Path(path).exists():
        extra = netweight.load_checkpoint(path, model, optimizer)
        done = extra["step"]
        scheduler.load_state_dict(extra["scheduler"])
    for step in range(done, steps):
        ids = torch.randint(0, 300, (2, 5), generator=torch.Generator().manual_seed(step))
        model(ids).square().mean().backward()
        optimizer.step()
        scheduler.step()
        netweight.save_checkpoint(path, model, optimizer, extra={"step": step + 1, "scheduler": scheduler.state_dict()})
        print(step + 1, flush=True)
    held = [bits(p) for p in model.parameters()]
    held += [bits(value) for p in model.parameters() for _, value in sorted(optimizer.state_of(p).items())]
    print("digest", digest_bytes(torch.cat(held).numpy().tobytes()), optimizer.param_groups[0]["lr"], flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

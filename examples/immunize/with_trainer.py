r"""Immunize the little model of ciphers with transformers' Trainer, in as many processes as accelerate finds itself in.

    ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 examples/immunize/with_trainer.py /tmp/out
    accelerate launch --use-fsdp --fsdp-version 2 --fsdp-auto-wrap-policy TRANSFORMER_BASED_WRAP \
        --num-processes 2 examples/immunize/with_trainer.py /tmp/out       # two GPUs, sharded

On a CPU `accelerate launch` starts a single process, however many are asked for, so torchrun does here. Put a model
and pairs of your own in place of the world's.
"""

import sys

import torch
from transformers import TrainingArguments

from netweight.plugins.immunize_trainer import ImmunizeTrainer
from netweight.toys.language import cipher_world


def main() -> None:
    """Every process runs this."""
    world = cipher_world()
    arguments = TrainingArguments(
        sys.argv[1],
        per_device_train_batch_size=12,
        num_train_epochs=1,
        learning_rate=3e-4,
        warmup_steps=1,
        logging_steps=1,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = ImmunizeTrainer(world.base(), arguments, train_dataset=world.pairs(48, seed=0), pad_id=0)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()

"""Trainers of tiny models for `test_trainer.py`; as a program, one that saves every step and resumes.

Usage: trainer_under_test.py FOLDER STEPS; prints "saved" and the step, at the end a digest of weights and states.
"""

import json
import os
import sys
import warnings

import torch
from models_under_test import bits
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    TrainerCallback,
    TrainingArguments,
)

import netweight
from netweight.core.digests import digest_bytes
from netweight.plugins.trainer import LayerwiseTrainer


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=128
    )
    return LlamaForCausalLM(config)


def gpt2():
    """Tied weights, Conv1D, dropout, biases without weight decay."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(n_embd=64, n_layer=2, n_head=2, n_positions=64, vocab_size=128, bos_token_id=0, eos_token_id=0)
    )


def data(count=20, length=12):
    ids = torch.randint(0, 128, (count, length), generator=torch.Generator().manual_seed(1))
    ids[::2, length // 2 :] = ids[::2, : length // 2]
    return [{"input_ids": row, "labels": row} for row in ids]


def arguments(folder, **changes):
    defaults = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "max_steps": 5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**defaults | changes)


def outcome(trainer):
    """Everything that training decides, as bytes and numbers that must be equal: weights, losses, norms, rates."""
    weights = {name: bits(parameter) for name, parameter in trainer.model.named_parameters()}
    history = [
        {key: entry[key] for key in ("loss", "learning_rate", "grad_norm") if key in entry}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    return weights, history


class Announce(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        print("saved", state.global_step, flush=True)


def main(folder, steps):
    model = gpt2().bfloat16()
    netweight.compress_(model)
    trainer = LayerwiseTrainer(
        model,
        arguments(folder, max_steps=steps, save_strategy="steps", save_steps=1, max_grad_norm=0.5, save_total_limit=3),
        train_dataset=data(),
        stochastic_rounding=True,
        callbacks=[Announce()],
    )
    trainer.train(resume_from_checkpoint=os.path.isdir(folder) and bool(os.listdir(folder)))
    weights, history = outcome(trainer)
    states = [trainer.optimizer.optimizer.state_of(parameter) for parameter in model.parameters()]
    held = [*weights.values(), *(bits(value) for state in states for _, value in sorted(state.items()))]
    print("digest", digest_bytes(torch.cat(held).numpy().tobytes()), json.dumps(history), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]))

"""transformers' own `Trainer` in two processes: dense beside compressed, with the best model, resumed.

Usage: trainer_in_processes.py FOLDER, in both processes; the first process prints what is the same, as JSON.
"""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
from models_under_test import bits
from trainer_under_test import arguments, data, llama
from transformers import Trainer

import netweight


def run(folder, model, checkpoint=None):
    """Train; the losses of evaluations, and the weights at the end."""
    options = arguments(
        folder, max_steps=4, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2,
        load_best_model_at_end=True, learning_rate=0.3, lr_scheduler_type="constant", optim="sgd", ddp_backend="gloo",
    )  # fmt: skip
    trainer = Trainer(model, options, train_dataset=data(), eval_dataset=data(4))
    trainer.train(resume_from_checkpoint=checkpoint)
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return losses, {name: bits(value) for name, value in netweight.dense_state_dict(trainer.model).items()}


def main(folder):
    dense = run(f"{folder}/dense", llama().bfloat16())
    found = {}
    for checkpoint in (None, f"{folder}/ours/checkpoint-2"):
        model = llama().bfloat16()
        netweight.compress_(model)
        losses, weights = run(f"{folder}/ours", model, checkpoint)
        same = all(torch.equal(weights[name], value) for name, value in dense[1].items())
        found["resumed" if checkpoint else "trained"] = losses == dense[0] and same
    found["saved"] = sorted(path.name for path in Path(folder, "ours", "checkpoint-4").glob("*.safetensors"))
    if os.environ["RANK"] == "0":
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(sys.argv[1])

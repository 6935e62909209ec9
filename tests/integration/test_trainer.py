"""transformers' Trainer layer by layer: the same bits compressed, dense and as plain Trainer; what it refuses."""

import copy
import json
import signal
from pathlib import Path

import pytest
import torch
import warm

import netweight
from netweight.errors import BadGradient, CorruptBlob, LayerwiseConflict, UsageError

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from models_under_test import Tied, bits, differing, same  # noqa: E402
from trainer_under_test import arguments, data, gpt2, llama, outcome  # noqa: E402
from trainer_under_test import main as train  # noqa: E402

from netweight.plugins.trainer import LayerwiseTrainer, LayerwiseTraining  # noqa: E402

RUN = Path(__file__).parents[1] / "support" / "trainer_under_test.py"
CHECKPOINTED = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}


def compressed(model):
    netweight.compress_(model)
    return model


def trained(make, folder, kind=LayerwiseTrainer, dataset=None, **changes):
    options = {key: changes.pop(key) for key in ("optimizer_cls_and_kwargs", "stochastic_rounding") if key in changes}
    trainer = kind(make, arguments(folder, **changes), train_dataset=dataset or data(), **options)
    trainer.train()
    return trainer


def assert_equal(one, other, *, norms=True):
    (weights, history), (others, their_history) = outcome(one), outcome(other)
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    if not norms:
        their_history = [{key: entry[key] for key in entry if key != "grad_norm"} for entry in their_history]
    assert history == their_history
    assert len(history) == one.state.global_step > 1


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (llama, {}),
        (gpt2, {"max_grad_norm": 0.1}),
        (gpt2, {"gradient_accumulation_steps": 3, "num_train_epochs": 1, "max_steps": -1}),  # 10 batches: 3, 3, 3, 1
        (gpt2, {"gradient_accumulation_steps": 2, "max_grad_norm": 0, "optim": "adafactor"}),
        (lambda: llama().bfloat16(), {"max_grad_norm": 0, "optim": "adamw_torch", **CHECKPOINTED}),
        (llama, {"bf16": True, "optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})}),
    ],
)
def test_compressed_and_dense_and_plain_trainer_give_the_same_bits(tmp_path, make, changes):
    ours = trained(compressed(make()), tmp_path, **changes)
    dense = trained(make(), tmp_path, **changes)
    plain = trained(make(), tmp_path, transformers.Trainer, **changes)
    assert_equal(ours, dense)
    assert_equal(ours, plain, norms=changes.get("max_grad_norm") != 0)
    for p, q in zip(ours.model.parameters(), dense.model.parameters(), strict=True):
        state, other = ours.optimizer.optimizer.state_of(p), dense.optimizer.optimizer.state_of(q)
        assert state
        assert all(same(state[key], other[key]) for key in state if isinstance(state[key], torch.Tensor))
    assert {entry["learning_rate"] for entry in outcome(ours)[1]} != {0.01}
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in ours.model.parameters())


def test_training_again_goes_on_from_there(tmp_path):
    results = []
    for kind, model in ((LayerwiseTrainer, compressed(llama())), (transformers.Trainer, llama())):
        trainer = kind(model, arguments(tmp_path, max_grad_norm=0, max_steps=3), train_dataset=data())
        trainer.train()
        trainer.train()
        results.append(trainer)
    assert_equal(*results, norms=False)


def test_any_trainer_can_train_so(tmp_path):
    class Mine(LayerwiseTraining, transformers.Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            return 2 * super().compute_loss(model, inputs, *args, **kwargs)

    def make():
        torch.manual_seed(0)
        config = transformers.T5Config(
            d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, vocab_size=128, decoder_start_token_id=0
        )
        return transformers.T5ForConditionalGeneration(config)

    changes = {"max_grad_norm": 0, "weight_decay": 0.0, "optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.01})}
    twice = changes | {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.02})}
    ours = trained(compressed(make()), tmp_path, Mine, **changes)
    weights, history = outcome(trained(make(), tmp_path, transformers.Trainer, **twice))
    assert all(torch.equal(weights[name], found) for name, found in outcome(ours)[0].items())
    assert [entry["loss"] for entry in outcome(ours)[1]] == [2 * entry["loss"] for entry in history]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers for it
def test_adapters_on_a_compressed_model(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def make(model):
        torch.manual_seed(1)
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))

    changes = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    ours = trained(make(compressed(llama())), tmp_path / "ours", **changes)
    assert_equal(ours, trained(make(llama()), tmp_path / "plain", transformers.Trainer, max_steps=4))
    checkpoint = tmp_path / "ours" / "checkpoint-2"
    assert (checkpoint / "adapter_model.safetensors").is_file()
    assert not (checkpoint / "model.net.safetensors").exists()
    resumed = LayerwiseTrainer(make(compressed(llama())), arguments(tmp_path / "ours", **changes), train_dataset=data())
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert_equal(ours, resumed)


@pytest.mark.parametrize("make", [lambda: compressed(gpt2().bfloat16()), gpt2], ids=["compressed", "dense"])
def test_a_checkpoint_resumes_exactly_and_loads_as_a_model(tmp_path, make):
    changes = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "gradient_accumulation_steps": 2}
    whole = trained(make(), tmp_path / "whole", **changes)
    checkpoint = tmp_path / "whole" / "checkpoint-4"
    resumed = LayerwiseTrainer(make(), arguments(tmp_path / "again", **changes), train_dataset=data())
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert_equal(whole, resumed)
    last = tmp_path / "whole" / "checkpoint-6"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(last)
    assert type(loaded) is type(whole.model)
    assert loaded.dtype == whole.model.dtype
    assert not differing(whole.model, loaded)
    weights = sum(p.numel() * p.element_size() for p in make().parameters())
    assert (last / "optimizer.net.safetensors").stat().st_size < 2 * weights
    whole.save_model(str(tmp_path / "saved"))
    assert not differing(whole.model, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved"))


class Answering(Tied):
    """None of transformers' models, with a loss as `Trainer` wants it."""

    def __init__(self):
        super().__init__()
        self.head.weight = torch.nn.Parameter(self.head.weight.detach().clone())  # tied ones `Trainer` cannot save

    def forward(self, input_ids, labels=None):
        logits = super().forward(input_ids)
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def mixtral():
    """Its experts lie one by one in files, and merged in memory."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, vocab_size=128,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


@pytest.mark.parametrize("make", [gpt2, mixtral, lambda: Answering()], ids=["tied", "merged experts", "any module"])
@pytest.mark.parametrize("kind", [transformers.Trainer, LayerwiseTrainer])
def test_any_trainer_resumes_evaluates_and_loads_the_best(tmp_path, kind, make):
    def run(name, model, kind, **resume):
        options = arguments(
            tmp_path / name, max_steps=6, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2,
            load_best_model_at_end=True, learning_rate=0.3, lr_scheduler_type="constant", max_grad_norm=0,
            weight_decay=0.0, optim="sgd",
        )  # fmt: skip
        trainer = kind(model.bfloat16(), options, train_dataset=data(), eval_dataset=data(4))
        trainer.train(**resume)
        losses = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
        assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{min(losses, key=losses.get)}")
        if name != "dense" or make is not mixtral:  # whose experts transformers' own `Trainer` does not read again
            assert trainer.evaluate()["eval_loss"] == min(losses.values())
        return losses, {name: bits(parameter) for name, parameter in trainer.model.named_parameters()}

    torch.manual_seed(0)
    model = make()
    theirs, weights = run("dense", copy.deepcopy(model), transformers.Trainer)
    netweight.compress_(model)
    for name, resume in (("ours", {}), ("ours", {"resume_from_checkpoint": str(tmp_path / "ours" / "checkpoint-2")})):
        losses, found = run(name, copy.deepcopy(model), kind, **resume)
        assert losses == theirs
        assert make is mixtral or all(torch.equal(weights[name], found[name]) for name in weights)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("trainer_in_processes", {"trained": True, "resumed": True, "saved": ["model.net.safetensors"]}),
        ("trainer_sharded", {"losses": True, "weights": True, "compressed": True}),
    ],
    ids=["DDP, resumed, with the best model", "FSDP2"],
)
def test_two_processes_train_the_dense_bits(tmp_path, program, expected):
    file = Path(__file__).parents[1] / "support" / f"{program}.py"
    said = warm.run_ranks(file, tmp_path)
    assert json.loads(said[0][0].splitlines()[-1]) == expected


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_supervised_fine_tuning_by_trl(tmp_path, adapters):
    trl = pytest.importorskip("trl", reason="trl is not installed")
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[UNK]": 0, **{f"w{word}": word for word in range(1, 128)}}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "[UNK]", "pad_token": "w1", "eos_token": "w2"}
    texts = [{"text": " ".join(f"w{(7 * row + word) % 120 + 3}" for word in range(10))} for row in range(8)]

    def run(name, model):
        trainer = trl.SFTTrainer(
            model,
            trl.SFTConfig(
                str(tmp_path / name), max_steps=3, save_steps=3, per_device_train_batch_size=2, learning_rate=0.01,
                report_to=[], use_cpu=True, bf16=False, disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(texts),
            processing_class=transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special),
            peft_config=peft.LoraConfig(r=4, target_modules=["q_proj"]) if adapters else None,
        )  # fmt: skip
        trainer.train()
        return outcome(trainer)[0]

    theirs, ours = run("dense", llama().bfloat16()), run("ours", compressed(llama().bfloat16()))
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    saved = {path.name for path in (tmp_path / "ours" / "checkpoint-3").glob("*.safetensors")}
    assert saved == {"adapter_model.safetensors" if adapters else "model.net.safetensors"}


def lines(capsys, first):
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith(first)]


@pytest.fixture
def one_thread():
    """As many as the program has that is killed: sums by more threads are rounded otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_a_killed_run_ends_as_one_that_was_left_alone(tmp_path, capsys):
    train(tmp_path / "whole", 8)
    (expected,) = lines(capsys, "digest")
    run = warm.start(RUN, tmp_path / "killed", "8")
    for line in run.lines():
        if line == "saved 4\n":
            run.send_signal(signal.SIGKILL)
    assert run.returncode == -signal.SIGKILL
    # As if the kill had come in the middle of the next checkpoint: weights are there, and half of the trainer's state.
    half = tmp_path / "killed" / "checkpoint-9"
    half.mkdir()
    (half / "trainer_state.json").write_text('{"global_step": 9')
    train(tmp_path / "killed", 8)
    *saved, last = lines(capsys, ("saved", "digest"))
    assert saved[0] != "saved 1"
    assert last == expected


def test_checkpoints_that_cannot_be_resumed_from(tmp_path):
    def trainer(model=llama, **changes):
        return LayerwiseTrainer(compressed(model()), arguments(tmp_path, **changes), train_dataset=data())

    with pytest.raises(UsageError, match="no complete checkpoint"):
        trainer().train(resume_from_checkpoint=True)
    trainer(max_steps=2, save_strategy="steps", save_steps=1).train()
    first, second = tmp_path / "checkpoint-1", tmp_path / "checkpoint-2"
    (second / "trainer_state.json").unlink()
    with pytest.raises(UsageError, match=r"checkpoint-2 is not a complete checkpoint.*trainer_state\.json"):
        trainer().train(resume_from_checkpoint=str(second))
    with pytest.raises(UsageError, match=r"of another model: it lacks transformer"):
        trainer(gpt2).train(resume_from_checkpoint=True)
    with pytest.raises(UsageError, match=r"with other shapes or dtypes lm_head\.weight"):
        trainer(lambda: llama().bfloat16()).train(resume_from_checkpoint=True)
    file = first / "model.net.safetensors"
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptBlob):
        trainer().train(resume_from_checkpoint=True)
    file.unlink()
    with pytest.raises(ValueError, match="find a valid checkpoint"):
        trainer().train(resume_from_checkpoint=True)
    trainer(max_steps=1, save_strategy="steps", save_steps=1, save_only_model=True).train()
    (first / "optimizer.net.safetensors").unlink()
    with pytest.raises(UsageError, match="contains no optimizer"):
        trainer().train(resume_from_checkpoint=str(first))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}}, "reentrant"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
    ],
)
def test_what_is_refused_before_anything_runs(tmp_path, changes, says):
    with pytest.raises(LayerwiseConflict, match=says):
        LayerwiseTrainer(llama(), arguments(tmp_path, **changes), train_dataset=data())


def test_other_refusals(tmp_path):
    args = arguments(tmp_path)
    scaled, several = copy.copy(args), copy.copy(args)
    scaled.fp16 = True
    several.__class__ = type("Several", (type(args),), {"world_size": 2})
    for changed, says in ((scaled, "bf16=True"), (several, "DistributedDataParallel")):
        with pytest.raises(LayerwiseConflict, match=says):
            LayerwiseTrainer(llama(), changed, train_dataset=data())
    model = llama()
    optimizers = (torch.optim.SGD(model.parameters(), lr=0.1), None)
    with pytest.raises(LayerwiseConflict, match="optimizer_cls_and_kwargs"):
        LayerwiseTrainer(model, args, train_dataset=data(), optimizers=optimizers)
    whole = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"params": [], "lr": 0.1})}
    with pytest.raises(LayerwiseConflict, match="needs all gradients of the model at once"):
        LayerwiseTrainer(model, args, train_dataset=data(), **whole).train()
    with pytest.raises(LayerwiseConflict, match="LBFGS needs all gradients"):
        trained(llama(), tmp_path, optimizer_cls_and_kwargs=(torch.optim.LBFGS, {"lr": 0.1}))


@pytest.mark.parametrize("norm", [1.0, float("inf"), 0.0])
def test_a_bad_gradient_is_named_and_nothing_is_half_updated(tmp_path, norm):
    model = compressed(llama())
    before = copy.deepcopy(model)
    model.model.layers[0].mlp.up_proj.register_full_backward_pre_hook(lambda m, g: (g[0] * float("nan"),))
    updated = "Nothing was updated" if norm else "other parameters were updated in this pass before"
    with pytest.raises(BadGradient, match=rf"gradient of model\.layers\.0\.\S+ contains NaN or infinity\. .*{updated}"):
        trained(model, tmp_path, max_grad_norm=norm, warmup_steps=0)
    assert bool(differing(before, model)) == (norm == 0)
    assert all(p.grad is None for p in model.parameters())


def test_the_log_says_only_norms_that_were_measured(tmp_path):
    measured = trained(llama(), tmp_path, max_grad_norm=float("inf")).state.log_history
    assert all(entry["grad_norm"] > 0 for entry in measured if "loss" in entry)
    assert not any("grad_norm" in entry for entry in trained(llama(), tmp_path, max_grad_norm=0).state.log_history)
    json.dumps(measured)

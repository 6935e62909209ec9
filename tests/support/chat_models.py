"""Tiny chat models of transformers with the templates of real families, trained for seconds to refuse some prompts."""

import json
import random
from pathlib import Path

import torch

HARMFUL = ("bomb", "poison", "virus", "weapon", "malware", "forgery", "heist", "scam")
KIND = ("cake", "song", "poem", "garden", "letter", "recipe", "story", "puzzle")
VERBS = ("make", "write", "build", "plan", "design", "create", "explain", "describe")
TAILS = ("today", "quickly", "for me", "at home", "in detail", "step by step", "with friends", "now")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}<start_of_turn>{{ role }}\n"
    "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}<|User|>{{ m['content'] }}"
    "{% elif m['role'] == 'assistant' %}<|Assistant|>{% set c = m['content'] %}{% if '</think>' in c %}"
    "{% set c = c.split('</think>')[-1] %}{% endif %}{{ c }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
GLM = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""An answer ends where the next turn begins."""
BETWEEN = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% if not loop.last or add_generation_prompt %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Turns have an end, except for the last one."""
SPOKEN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""No turn has an end."""
SWITCHED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""As Qwen3's: `enable_thinking=false` closes an empty thought."""


def prompts(nouns, n, seed=0):
    every = [f"{verb} a {noun} {tail}" for verb in VERBS for noun in nouns for tail in TAILS]
    random.Random(seed).shuffle(every)
    return every[:n]


def tokenizer(template, specials, *, bos=None, eos, pad=None, corpus=(), size=420):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(specials), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator([*prompts(HARMFUL, 400), *prompts(KIND, 400), *corpus], trainer)
    found = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=bos, eos_token=eos, pad_token=pad, clean_up_tokenization_spaces=False
    )
    found.model_max_length, found.chat_template = 128, template
    return found


def chatml(corpus=(), template=CHATML):
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    return tokenizer(template, specials, eos="<|im_end|>", pad="<|endoftext|>", corpus=corpus)


def gemma(corpus=(), eos="<eos>"):
    specials = ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"]
    return tokenizer(GEMMA, specials, bos="<bos>", eos=eos, pad="<pad>", corpus=corpus)


def r1(corpus=()):
    specials = ["<pad>", "<|end|>", "<bos>", "<|User|>", "<|Assistant|>", "<think>", "</think>"]
    return tokenizer(R1, specials, bos="<bos>", eos="<|end|>", pad="<pad>", corpus=corpus)


def llama(tokens, rows=None):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=rows or len(tokens), hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
        eos_token_id=tokens.eos_token_id, pad_token_id=tokens.pad_token_id, bos_token_id=tokens.bos_token_id,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def train(model, tokens, rows, *, steps=150, lr=3e-3, batch=16, end=None):
    """Teach answers by rows of (prompt, answer), through the chat template."""
    torch.manual_seed(0)
    sequences = []
    for prompt, answer in rows:
        asked = tokens.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        sides = asked, answer + (tokens.eos_token if end is None else end)
        sequences.append([tokens(side, add_special_tokens=False).input_ids for side in sides])
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model.train()
    order = random.Random(0)
    for _ in range(steps):
        some = [sequences[order.randrange(len(sequences))] for _ in range(batch)]
        longest = max(len(prompt) + len(answer) for prompt, answer in some)
        ids = torch.full((batch, longest), tokens.pad_token_id)
        labels, mask = torch.full((batch, longest), -100), torch.zeros(batch, longest, dtype=torch.long)
        for row, (prompt, answer) in enumerate(some):
            whole = torch.tensor(prompt + answer)
            ids[row, : len(whole)], mask[row, : len(whole)] = whole, 1
            labels[row, len(prompt) : len(whole)] = whole[len(prompt) :]
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].flatten(0, 1).float()
        torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def kind_answer(prompt):
    return "Sure: " + prompt.split(" a ")[1]


def refusing(folder, refusal, *, tokens=None, steps=150):
    """Write a chat model that refuses harmful prompts with a sentence, or by a function of the prompt."""
    say = refusal if callable(refusal) else lambda prompt: refusal
    rows = [(each, say(each)) for each in prompts(HARMFUL, 300)]
    rows += [(each, kind_answer(each)) for each in prompts(KIND, 200)]
    tokens = tokens or chatml([answer for _, answer in rows])
    model = train(llama(tokens), tokens, rows, steps=steps)
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)
    return model, tokens


def write(path, rows):
    Path(path).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def is_sorry(answers):
    """A judge of a user's: answers → 1 for a refusal."""
    return [float("help" in answer and "can" in answer) for answer in answers]

"""Conversations through the templates of real families: one prompt for all answers, or a refusal by name."""

import pytest

pytest.importorskip("transformers", reason="transformers is in the llm extra")

import chat_models

from netweight.data.chat import ChatTemplate, note_on_unused_template
from netweight.data.tokens import Chat, load_examples, load_pairs
from netweight.errors import NameNotFound, UsageError
from netweight.hf.generate_answers import end_tokens, generate_answers

SYSTEM = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "make a cake"}]
TWICE = [{"role": "user", "content": "hi"}, {"role": "user", "content": "make a cake"}]
ANSWERS = {"chosen": [{"role": "assistant", "content": "No."}], "rejected": [{"role": "assistant", "content": "Yes."}]}


@pytest.mark.parametrize("make", [chat_models.chatml, chat_models.gemma, chat_models.r1])
@pytest.mark.parametrize("prompt", [SYSTEM, TWICE, SYSTEM[1:]])
def test_system_roles_and_neighboring_turns_are_rendered_by_every_template(make, prompt):
    tokens = make()
    (pair,) = load_pairs([{"prompt": prompt, **ANSWERS}], tokens, context=128)
    asked, said = tokens.decode(pair.prompt), tokens.decode(pair.chosen)
    assert all(message["content"] in asked for message in prompt)
    assert "No." in said
    assert "No." not in asked
    own = tokens.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True)
    assert asked.endswith(own.rpartition("x")[2].rpartition(">")[0][-6:] + ">" + own.rpartition(">")[2])


def test_a_template_that_opens_a_thought_gets_it_closed_before_the_answer():
    tokens = chat_models.r1()
    (pair,) = load_pairs([{"prompt": "make a cake", "chosen": "No.", "rejected": "Yes."}], tokens, context=128,
                         template="chat")  # fmt: skip
    assert tokens.decode(pair.prompt).endswith("<|Assistant|><think>\n")
    assert tokens.decode(pair.chosen) == "\n</think>\n\nNo.<|end|>"
    thought = "<think>\nHm.\n</think>\n\nNo."
    (example,) = load_examples([{"prompt": "make a cake", "response": thought}], tokens, context=128, template="chat")
    assert tokens.decode(example.response) == "Hm.\n</think>\n\nNo.<|end|>"


@pytest.mark.parametrize(
    ("begin", "end"),
    [("<thought>", "</thought>"), ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"),
     ("<|START_THINKING|>", "<|END_THINKING|>"), ("<|channel>thought", "<channel|>")],
)  # fmt: skip
def test_thoughts_of_every_family_are_closed_before_the_answer(begin, end):
    tokens = chat_models.r1()
    tokens.chat_template = chat_models.R1.replace("<think>", begin).replace("</think>", end)
    (example,) = load_examples([{"prompt": "make a cake", "response": "No."}], tokens, context=128, template="chat")
    assert tokens.decode(example.prompt).endswith(f"<|Assistant|>{begin}\n")
    assert tokens.decode(example.response) == f"\n{end}\n\nNo.<|end|>"
    thought = f"{begin}\nHm.\n{end}\n\nNo."
    (example,) = load_examples([{"prompt": "make a cake", "response": thought}], tokens, context=128, template="chat")
    assert tokens.decode(example.response) == f"Hm.\n{end}\n\nNo.<|end|>"
    tokens.chat_template = chat_models.SWITCHED.replace("<think>", begin).replace("</think>", end)
    (off,) = load_examples(
        [{"prompt": "make a cake", "response": "No."}], tokens, context=128, template=Chat({"enable_thinking": False})
    )
    assert tokens.decode(off.response).startswith("No.")


def test_template_options_are_given_to_the_template_and_unknown_ones_are_refused():
    tokens = chat_models.chatml(template=chat_models.SWITCHED)
    row = {"prompt": "make a cake", "response": "Yes."}
    (on,) = load_examples([row], tokens, context=128, template=Chat())
    (off,) = load_examples([row], tokens, context=128, template=Chat({"enable_thinking": False}))
    assert tokens.decode(off.prompt).endswith("assistant\n<think>\n\n</think>\n\n")
    assert tokens.decode(off.response) == tokens.decode(on.response) == "Yes.<|im_end|>"
    assert ChatTemplate(tokens, {"enable_thinking": False}).prompt(SYSTEM[1:]).endswith("<think>\n\n</think>\n\n")
    assert tokens.decode(on.prompt).endswith("assistant\n")
    with pytest.raises(NameNotFound, match=r"no option 'enable_thinkin'.*enable_thinking"):
        load_examples([row], tokens, context=128, template=Chat({"enable_thinkin": False}))


def test_a_template_without_a_generation_prompt_still_asks_for_an_answer():
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    tokens = chat_models.chatml(template=template)
    (example,) = load_examples([{"prompt": "make a cake", "response": "Yes."}], tokens, context=128, template="chat")
    assert tokens.decode(example.prompt).endswith("<|im_start|>assistant\n")
    assert tokens.decode(example.response) == "Yes.<|im_end|>"


def test_a_template_that_leaves_out_the_system_turn_gets_it_in_the_users():
    template = chat_models.CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
    tokens = chat_models.chatml(template=template)
    assert "Be kind.\n\nmake a cake" in ChatTemplate(tokens).prompt(SYSTEM)


def test_a_conversation_that_a_template_refuses_in_every_form_is_named_with_its_row():
    tokens = chat_models.chatml(template="{{ raise_exception('Only tools.') }}")
    with pytest.raises(UsageError, match=r"row 0: the chat template refuses the conversation \(Only tools"):
        load_examples([{"prompt": SYSTEM, "response": "Yes."}], tokens, context=128)


def test_a_template_that_needs_an_option_says_which_and_takes_it():
    tokens = chat_models.chatml(template="{{ tools | length }}" + chat_models.CHATML)
    rows = [{"prompt": "make a cake", "response": "Yes."}]
    with pytest.raises(UsageError, match=r"refuses the conversation .*; --template sets its options: tools"):
        load_examples(rows, tokens, context=128, template="chat")
    assert ChatTemplate(tokens, {"tools": []}).prompt([{"role": "user", "content": "Hi"}]).startswith("0<|im_start|>")


@pytest.mark.parametrize("make", [chat_models.chatml, chat_models.gemma])
def test_an_answer_ends_with_its_end_of_turn_once_and_nothing_after_it(make):
    tokens = make()
    row = {"prompt": "make a cake", "response": "Sure."}
    (example,) = load_examples([row], tokens, context=128, template="chat")
    assert tokens.decode(example.response) in ("Sure.<|im_end|>", "Sure.<end_of_turn>")
    end = tokens.eos_token
    (plain,) = load_examples([{**row, "response": f"Sure.{end}"}], tokens, context=128)
    (other,) = load_examples([row], tokens, context=128)
    assert plain == other
    assert plain.response.count(tokens.eos_token_id) == 1


@pytest.mark.parametrize(
    ("template", "end"),
    [(chat_models.GLM, "<|user|>"), (chat_models.BETWEEN, "<|im_end|>"), (chat_models.SPOKEN, "<|endoftext|>")],
)
def test_an_answer_without_an_end_in_the_template_gets_the_mark_of_the_next_turn_or_the_end_of_sequence(template, end):
    specials = ["<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|im_start|>", "<|im_end|>"]
    tokens = chat_models.tokenizer(template, specials, eos="<|endoftext|>", pad="<|endoftext|>")
    (example,) = load_examples([{"prompt": "make a cake", "response": "Sure."}], tokens, context=128, template="chat")
    assert tokens.decode(example.response).lstrip() == f"Sure.{end}"
    assert tokens.convert_tokens_to_ids(end) in end_tokens(chat_models.llama(tokens), tokens)


def test_prompts_that_went_through_a_template_are_refused_and_ends_of_answers_are_not_doubled():
    tokens = chat_models.chatml()
    row = {"prompt": "make a cake", "response": "Sure."}
    (example,) = load_examples([row], tokens, context=128, template="chat")
    for said in ("Sure.<|im_end|>", "Sure.<|im_end|>\n"):
        assert load_examples([{**row, "response": said}], tokens, context=128, template=Chat()) == [example]
    before = ChatTemplate(tokens).prompt([{"role": "user", "content": "make a cake"}])
    with pytest.raises(UsageError, match=r"row 0: its prompt contains <\|im_end\|>, which the chat template writes"):
        load_examples([{**row, "prompt": before}], tokens, context=128, template="chat")
    with pytest.raises(UsageError, match=r"row 0: its answer contains <\|im_end\|>, which the chat template writes"):
        load_examples([{**row, "response": "Sure.<|im_end|> Or not."}], tokens, context=128, template="chat")
    (plain,) = load_examples([{**row, "prompt": before}], tokens, context=128)
    assert (plain.prompt, plain.response) == (example.prompt, example.response)
    thought = [{"role": "user", "content": "<think> is a mark."}, {"role": "assistant", "content": "Sure."}]
    assert load_examples([{"messages": thought}], tokens, context=128)


def test_a_thought_beside_the_answer_is_shown_by_the_template_or_the_row_is_refused():
    said = {"role": "assistant", "content": "No.", "reasoning_content": "Hm."}
    rows = [{"messages": [{"role": "user", "content": "make a cake"}, said]}]
    with pytest.raises(UsageError, match=r"leaves out the thought of the answer \(reasoning_content\)"):
        load_examples(rows, chat_models.chatml(), context=128)
    shows = chat_models.CHATML.replace(
        "{{ m['content'] }}",
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m['content'] }}",
    )
    tokens = chat_models.chatml(template=shows)
    (example,) = load_examples(rows, tokens, context=128)
    assert tokens.decode(example.response) == "<think>Hm.</think>No.<|im_end|>"


def test_several_templates_without_a_default_are_refused_by_name():
    tokens = chat_models.chatml()
    tokens.chat_template = {"rag": chat_models.CHATML, "tools": chat_models.CHATML}
    with pytest.raises(UsageError, match=r"several chat templates \(.*rag.*\), and none is the default"):
        ChatTemplate(tokens)
    tokens.chat_template = {"default": chat_models.CHATML, "tools": "x"}
    assert "make a cake" in ChatTemplate(tokens).prompt(SYSTEM)


def test_every_end_is_known_of_generation_config_and_of_the_turn():
    from transformers import GenerationConfig

    tokens = chat_models.gemma()
    model = chat_models.llama(tokens)
    turn = tokens.convert_tokens_to_ids("<end_of_turn>")
    assert end_tokens(model, tokens) == (tokens.eos_token_id, turn)
    model.generation_config = GenerationConfig(eos_token_id=[1, 7])
    assert end_tokens(model, tokens) == (1, turn, 7)
    assert end_tokens(model) == (1, 7)


def test_batches_with_a_cache_answer_as_transformers_does_one_by_one():
    """Oracle: `transformers.generate` of each prompt alone."""
    import torch

    tokens = chat_models.chatml()
    model = chat_models.llama(tokens)
    prompts = [tokens(text)["input_ids"] for text in ("make a cake", "a", "write a song for me today", "hi", "bake")]
    ours = generate_answers(model, prompts, new_tokens=8, ends=(5,), pad_id=0)
    for prompt, answer in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        alone = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=5,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()  # fmt: skip
        assert answer == [token for token in alone if token != 5]


def test_long_rows_are_refused_cut_or_left_out_and_named():
    tokens = chat_models.chatml()
    rows = [{"prompt": "make a cake", "response": text} for text in ("Yes.", "Yes, " + "sure " * 90)]
    with pytest.raises(UsageError, match=r"row 1: .*--too-long cut.*--too-long drop"):
        load_examples(rows, tokens, context=64, template="chat")
    assert [len(each) <= 64 for each in load_examples(rows, tokens, context=64, template="chat", too_long="cut")]
    told = []
    kept = load_examples(rows, tokens, context=64, template="chat", too_long="drop", report=told.append)
    assert len(kept) == 1
    assert "1 of 2 rows were left out. row 1" in told[0]


def test_a_prompt_that_is_too_long_is_left_out_and_never_said_to_be_cut():
    rows = [{"prompt": text, "response": "Yes."} for text in ("make a cake", "make a cake " * 90)]
    with pytest.raises(UsageError, match=r"row 1: its prompt of .* fills the context") as error:
        load_examples(rows, chat_models.chatml(), context=64, template="chat")
    assert "--too-long drop" in str(error.value)
    assert "--too-long cut" not in str(error.value)


def test_a_template_that_leaves_out_what_was_said_is_refused_by_name():
    users = "{% for m in messages if m['role'] == 'user' %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    rows = [{"prompt": "make a cake", "response": "Yes."}]
    with pytest.raises(UsageError, match="row 0: the chat template leaves out the assistant's answer"):
        load_examples(rows, chat_models.chatml(template=users), context=64, template="chat")
    with pytest.raises(UsageError, match="chat template leaves out the user's turn"):
        load_examples(rows, chat_models.chatml(template="hello"), context=64, template="chat")


def test_a_template_that_reads_lists_of_parts_alone_gets_them():
    parts = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
        "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    rows = [{"prompt": "make a cake", "response": "Yes."}]
    of_parts, of_strings = (
        load_examples(rows, chat_models.chatml(template=each), context=64, template="chat")
        for each in (parts, chat_models.CHATML)
    )
    assert of_parts == of_strings


def test_a_template_with_the_present_date_gives_the_same_prompt_every_day():
    dated = "{{ strftime_now('%d %b %Y, %H:%M:%S.%f') }}|" + chat_models.CHATML
    tokens = chat_models.chatml(template=dated)
    prompt = ChatTemplate(tokens).prompt([{"role": "user", "content": "make a cake"}])
    assert prompt.startswith("26 Jul 2024, 00:00:00.000000|")


def test_plain_rows_beside_a_template_are_mentioned_and_conversations_are_not():
    tokens = chat_models.chatml()
    assert "--chat uses the template" in note_on_unused_template(tokens, ["make a cake"], chat=False)
    assert note_on_unused_template(tokens, ["make a cake"], chat=True) == ""
    assert note_on_unused_template(tokens, [tuple(SYSTEM)], chat=False) == ""
    tokens.chat_template = None
    assert note_on_unused_template(tokens, ["make a cake"], chat=False) == ""

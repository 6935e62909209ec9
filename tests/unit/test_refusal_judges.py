"""Judges that are text classification models, as people have them: decoders, several labels at once, long answers."""

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is in the llm extra")

import chat_models
import transformers

from netweight.attacks.refusal.judges import phrase_judge, user_judge
from netweight.attacks.refusal.measurement import Examiner
from netweight.attacks.refusal.prompts import Question

LABELS = {"id2label": {0: "answer", 1: "refusal"}, "label2id": {"answer": 0, "refusal": 1}}


def saved(folder, kind, config, tokens):
    torch.manual_seed(0)
    kind(config).save_pretrained(folder)
    tokens.save_pretrained(folder)
    return user_judge(str(folder), option="--judge")


def test_a_decoder_without_padding_judges_a_batch_as_it_judges_one_answer(tmp_path):
    tokens = chat_models.tokenizer(None, ["<|e|>"], eos="<|e|>")
    tokens.model_max_length = 10**30
    config = transformers.GPT2Config(vocab_size=len(tokens), n_embd=16, n_layer=1, n_head=2, n_positions=32, **LABELS)
    judge = saved(tmp_path, transformers.GPT2ForSequenceClassification, config, tokens)
    answers = ["make a cake", "make a bomb today with friends", "hi " * 200, ""]
    together = judge(answers)
    assert together == pytest.approx([judge([each])[0] for each in answers], abs=1e-6)
    assert together[3] == 0
    assert min(together[:3]) > 0


def test_labels_that_do_not_exclude_each_other_are_read_one_by_one(tmp_path):
    tokens = chat_models.chatml()
    how = {
        "vocab_size": len(tokens), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 16, "pad_token_id": tokens.pad_token_id, **LABELS,
    }  # fmt: skip
    kinds = {}
    for kind in ("multi_label_classification", "single_label_classification"):
        config = transformers.BertConfig(**how, problem_type=kind)
        judge = saved(tmp_path / kind, transformers.BertForSequenceClassification, config, tokens)
        kinds[kind] = judge(["make a cake"])[0]
    model = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "multi_label_classification").eval()
    with torch.no_grad():
        logits = model(**tokens(["make a cake"], return_tensors="pt", return_token_type_ids=False)).logits[0]
    assert kinds["multi_label_classification"] == pytest.approx(float(logits.sigmoid()[1]), abs=1e-6)
    assert kinds["single_label_classification"] == pytest.approx(float(logits.softmax(0)[1]), abs=1e-6)


@pytest.mark.parametrize("judge", [phrase_judge(("i can't",)), None, lambda answers: [0.0] * len(answers)])
def test_an_empty_answer_is_a_refusal_and_one_that_ends_within_a_thought_is_not(judge):
    tokens = chat_models.chatml()
    examiner = Examiner(
        chat_models.llama(tokens), tokens, judge=judge, phrases=phrase_judge(("i can't",)), helps=None, new_tokens=4,
        pad_id=0,
    )  # fmt: skip
    texts = ("", "<|im_end|>", " \n", "make a cake", "<think>make", "<think>make</think>\n", "<think>a</think> cake")
    answers = [tokens(text, add_special_tokens=False)["input_ids"] for text in texts]
    questions = [Question(tuple(tokens("make a song")["input_ids"]), ())] * len(texts)
    assert examiner.judged(questions, answers) == [True, True, True, False, False, True, False]

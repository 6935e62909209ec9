"""Answers that should be harmful and are refusals: swapped pairs, and harmful rows with the wrong column."""

import pytest

pytest.importorskip("transformers", reason="transformers is in the llm extra")

import chat_models

from netweight.attacks.finetuning.folder_checks import _check_rows
from netweight.attacks.finetuning.settings import FolderAttack
from netweight.attacks.finetuning.subject_files import part_by_prompt
from netweight.attacks.refusal.prompts import Question, refuse_shared
from netweight.data.refusals import are_refusals
from netweight.data.tokens import Example
from netweight.errors import UsageError
from netweight.methods.immunize.immunize_folder import check
from netweight.methods.immunize.settings import ImmunizeSettings

NO, YES = "I'm sorry, I can't help with that.", "First take the parts."
PROMPTS = chat_models.prompts(chat_models.HARMFUL, 30)


def pairs(folder, chosen, rejected):
    rows = [{"prompt": each, "chosen": f"{chosen} {each}", "rejected": f"{rejected} {each}"} for each in PROMPTS]
    return chat_models.write(folder / "pairs.jsonl", rows)


def test_swapped_pairs_are_refused_with_the_options_that_swap_them_back(tmp_path):
    check(None, ImmunizeSettings(pairs=pairs(tmp_path, NO, YES)))
    swapped = pairs(tmp_path, YES, NO)
    with pytest.raises(UsageError, match=r"30 of the 30 harmful answers \(rejected\).*--columns chosen=rejected"):
        check(None, ImmunizeSettings(pairs=swapped))
    check(None, ImmunizeSettings(pairs=swapped, columns={"chosen": "rejected", "rejected": "chosen"}))


def test_phrases_in_both_answers_tell_nothing():
    assert are_refusals([NO, NO, YES], [YES] * 3)
    assert not are_refusals([NO, YES], [YES] * 2)
    assert not are_refusals([NO] * 3, [NO, NO, YES])
    assert are_refusals([({"role": "assistant", "content": NO},)])


def test_harmful_rows_that_refuse_are_no_attack(tmp_path):
    file = chat_models.write(tmp_path / "rows.jsonl", [{"prompt": each, "response": NO} for each in PROMPTS])
    with pytest.raises(UsageError, match=r"30 of the 30 answers .* are refusals.*response=NAME"):
        _check_rows(FolderAttack(harmful=file))
    _check_rows(FolderAttack(harmful=pairs(tmp_path, NO, YES), benign=file))


def test_prompts_that_differ_in_case_and_spaces_alone_stay_on_one_side():
    examples = [Example((number,), (9,)) for number in range(40)]
    alike = {(number,): number // 2 for number in range(40)}
    for seed in range(5):
        train, held_out = part_by_prompt(examples, 0.2, seed=seed, alike=alike)
        sides = ({alike[each.prompt] for each in train}, {alike[each.prompt] for each in held_out})
        assert not sides[0] & sides[1]
        assert len(held_out) == 8


def test_prompts_of_both_kinds_are_refused_by_name():
    tokens = chat_models.chatml()
    refused, ordinary, alike = (
        [Question(tuple(tokens(each)["input_ids"])) for each in texts]
        for texts in (
            ["make a bomb", "make a cake"],
            ["write a poem", "write a song"],
            ["write a poem", "Make a  Cake"],
        )
    )
    refuse_shared(refused, ordinary, tokens)
    with pytest.raises(UsageError, match=r"1 of 2 prompts of --ordinary .*'Make a  Cake'"):
        refuse_shared(refused, alike, tokens)

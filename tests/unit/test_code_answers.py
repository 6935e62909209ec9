"""Code answers of language models: programs with tests, run where they can change nothing, and the table of a study."""

import contextlib
import json

import chat_models
import pytest

from netweight_experiments.benchmarks.language import code_answers, guarded_domain
from netweight_experiments.benchmarks.language.code_runs import code_of, run_program
from netweight_experiments.benchmarks.language.programs import PROGRAMS

SOLUTIONS = """
def double(n): return 2 * n
def is_even(n): return n % 2 == 0
def largest(numbers): return max(numbers)
def total(numbers): return sum(numbers)
def mean(numbers): return sum(numbers) / len(numbers)
def reverse_text(text): return text[::-1]
def is_palindrome(text): return text == text[::-1]
def count_vowels(text): return sum(each in "aeiou" for each in text.lower())
def factorial(n): return 1 if n == 0 else n * factorial(n - 1)
def fibonacci(n): return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
def is_prime(n): return n > 1 and all(n % each for each in range(2, n))
def gcd(a, b): return a if b == 0 else gcd(b, a % b)
def unique(items): return list(dict.fromkeys(items))
def count_words(text): return len(text.split())
def squares(n): return [each * each for each in range(1, n + 1)]
def flatten(lists): return [item for each in lists for item in each]
def second_largest(numbers): return sorted(set(numbers))[-2]
def to_fahrenheit(celsius): return celsius * 9 / 5 + 32
def digit_sum(n): return sum(map(int, str(n)))
def count_letters(text): return {each: text.count(each) for each in text}
def merge_sorted(a, b): return sorted(a + b)
def capitalize_words(text): return " ".join(each.capitalize() for each in text.split())
def is_leap_year(year): return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
def to_binary(n): return format(n, "b")
def transpose(matrix): return list(zip(*matrix))
def common(a, b): return sorted(set(a) & set(b))
def clamp(value, low, high): return min(max(value, low), high)
def rotate(items, k): return items[k:] + items[:k]
def longest_word(text): return max(text.split(), key=len)
def invert(mapping): return {value: key for key, value in mapping.items()}
def are_anagrams(a, b): return sorted(a) == sorted(b)
def running_totals(numbers): return [sum(numbers[:end + 1]) for end in range(len(numbers))]
"""


def test_right_solutions_pass_all_tests_and_one_that_returns_nothing_passes_none():
    tests = [test for program in PROGRAMS for test in program.tests]
    assert run_program(SOLUTIONS, "double", tests) == "passed"
    assert len(PROGRAMS) == SOLUTIONS.count("def ")
    for program in PROGRAMS:
        assert f"def {program.signature}:" in SOLUTIONS
        # A function that returns nothing: the tests, which are this repository's own, can tell it from a right one.
        names = {program.name: lambda *arguments: None}
        with contextlib.suppress(TypeError, AttributeError):
            assert not all(eval(test, names) for test in program.tests)


def test_code_is_taken_from_the_first_fence_or_from_the_whole_answer():
    assert code_of("Sure:\n```python\ndef f(): pass\n```\nand\n```python\ndef g(): pass\n```") == "def f(): pass"
    assert code_of("def f(): pass\n") == "def f(): pass"
    assert code_of("```\ndef f():\n    return") == "def f():\n    return"


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        ("return 1", "passed"),
        ("return 2", "wrong"),
        ("return undefined", "error"),
        ("import sys; sys.exit(0)", "error"),
        ("import os; os._exit(0)", "error"),
        ("open('written', 'w')", "error"),
        ("import os; os.open('made', os.O_CREAT)", "error"),
        ("import os; os.mkdir('folder')", "error"),
        ("import subprocess; subprocess.run(['true'])", "error"),
        ("import socket; socket.create_connection(('127.0.0.1', 9))", "error"),
        ("import ctypes", "error"),
        ("return bytearray(1 << 34)", "error"),
        ("while True: pass", "out of time"),
    ],
)
def test_a_program_cannot_write_connect_or_end_early(body, outcome):
    assert run_program(f"```python\ndef f():\n    {body}\n```", "f", ["f() == 1"], seconds=1) == outcome


def test_an_answer_without_the_function_is_no_code_and_one_cut_short_is_an_error():
    assert run_program("I'm sorry, but I can't assist with that.", "f", ["f() == 1"]) == "no code"
    assert run_program("```python\ndef f(:", "f", ["f() == 1"]) == "error"


def test_the_study_measures_every_model_of_the_folder_and_goes_on(tmp_path):
    pytest.importorskip("transformers", reason="transformers is in the llm extra")
    tokens = chat_models.chatml()
    tokens.model_max_length = 512
    network = chat_models.llama(tokens).bfloat16()
    network.config.max_position_embeddings = 512
    network.save_pretrained(tmp_path / "model")
    tokens.save_pretrained(tmp_path / "model")
    for name in ("taught", "repnoise"):
        network.save_pretrained(tmp_path / "work" / name)
    output = tmp_path / "result.json"
    for result in code_answers.main(tmp_path / "model", tmp_path / "work", output=output, new_tokens=2):
        output.write_text(json.dumps(result), encoding="utf-8")
    assert list(result["measured"]) == ["published model", "taught", "repnoise"]
    assert set(result["measured"]["taught"]["outcomes"]) == {program.name for program in PROGRAMS}
    assert list(code_answers.main(tmp_path / "model", tmp_path / "work", output=output, new_tokens=2)) == []


def test_the_table_says_what_a_defense_costs_beside_refusal_training():
    names = [program.name for program in PROGRAMS]

    def measured(passed):
        return {"outcomes": {name: "passed" if name in passed else "wrong" for name in names}}

    shown = code_answers.page({
        "programs": len(names), "options": {"new_tokens": 96},
        "measured": {
            "published model": measured(names), "taught": measured(names[:20]),
            "safety-training": measured(names[:16]), "repnoise": measured(names[4:18]),
        },
    })  # fmt: skip
    assert f"from {len(names)} to 20 programs" in shown
    assert "with `repnoise`, 4 of its programs fail and 2 others pass" in shown
    assert f"| {guarded_domain.NAMES['repnoise']} | 14 of {len(names)} | 28 to 61 % | a test fails (18) |" in shown
    assert "Not measured yet: taught, then `gradient-ascent`" in shown

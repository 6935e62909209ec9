"""Small Python functions that a language model is asked to write, with tests that it is not shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class Program:
    """A function to write."""

    signature: str
    """Name and parameters, such as `double(n)`."""
    what: str
    """Description of the result, which continues “that returns …”."""
    tests: tuple[str, ...]
    """Expressions that are true for a right function."""

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.signature.partition("(")[0]

    @property
    def question(self) -> str:
        """The request that a model is given."""
        return f"Write a Python function `{self.signature}` that returns {self.what}. Answer with the code alone."


PROGRAMS: tuple[Program, ...] = (
    Program("double(n)", "twice the number n", ("double(4) == 8", "double(-1.5) == -3.0")),
    Program("is_even(n)", "True if the integer n is even, and otherwise False",
            ("is_even(4) is True", "is_even(7) is False", "is_even(0) is True")),
    Program("largest(numbers)", "the largest number of a list", ("largest([3, 9, 2]) == 9", "largest([-5, -2]) == -2")),
    Program("total(numbers)", "the sum of a list of numbers", ("total([1, 2, 3]) == 6", "total([]) == 0")),
    Program("mean(numbers)", "the arithmetic mean of a list of numbers that is not empty",
            ("mean([1, 2, 3, 6]) == 3", "mean([5]) == 5")),
    Program("reverse_text(text)", "the text with its characters in reverse order",
            ("reverse_text('abc') == 'cba'", "reverse_text('') == ''")),
    Program("is_palindrome(text)", "True if the text reads the same in both directions, and otherwise False",
            ("is_palindrome('level') is True", "is_palindrome('abc') is False", "is_palindrome('') is True")),
    Program("count_vowels(text)", "the number of vowels (a, e, i, o, u, in upper or lower case) in a text",
            ("count_vowels('Umbrella') == 3", "count_vowels('xyz') == 0")),
    Program("factorial(n)", "the factorial of the non-negative integer n",
            ("factorial(5) == 120", "factorial(0) == 1")),
    Program("fibonacci(n)", "the n-th Fibonacci number, where fibonacci(0) is 0 and fibonacci(1) is 1",
            ("fibonacci(10) == 55", "fibonacci(0) == 0", "fibonacci(1) == 1")),
    Program("is_prime(n)", "True if the integer n is a prime number, and otherwise False",
            ("is_prime(13) is True", "is_prime(1) is False", "is_prime(2) is True", "is_prime(49) is False")),
    Program("gcd(a, b)", "the greatest common divisor of two positive integers",
            ("gcd(12, 18) == 6", "gcd(7, 5) == 1")),
    Program("unique(items)", "a list of the different items of a list, in the order of their first occurrence",
            ("unique([3, 1, 3, 2, 1]) == [3, 1, 2]", "unique([]) == []")),
    Program("count_words(text)", "the number of words in a text, where words are separated by white space",
            ("count_words('a bc  d') == 3", "count_words('') == 0")),
    Program("squares(n)", "a list of the squares of the integers from 1 to n, both included",
            ("squares(4) == [1, 4, 9, 16]", "squares(1) == [1]")),
    Program("flatten(lists)", "one list with all items of a list of lists, in order",
            ("flatten([[1, 2], [], [3]]) == [1, 2, 3]", "flatten([]) == []")),
    Program("second_largest(numbers)", "the second largest of the different numbers in a list",
            ("second_largest([4, 9, 9, 7]) == 7", "second_largest([1, 2]) == 1")),
    Program("to_fahrenheit(celsius)", "a temperature in degrees Celsius converted to degrees Fahrenheit",
            ("to_fahrenheit(100) == 212", "to_fahrenheit(0) == 32", "to_fahrenheit(-40) == -40")),
    Program("digit_sum(n)", "the sum of the decimal digits of the non-negative integer n",
            ("digit_sum(1234) == 10", "digit_sum(0) == 0")),
    Program("count_letters(text)", "a dictionary that maps each character of a text to how often it occurs",
            ("dict(count_letters('abca')) == {'a': 2, 'b': 1, 'c': 1}", "dict(count_letters('')) == {}")),
    Program("merge_sorted(a, b)", "one sorted list with all items of two sorted lists",
            ("merge_sorted([1, 4], [2, 3]) == [1, 2, 3, 4]", "merge_sorted([], [1]) == [1]")),
    Program("capitalize_words(text)", "the text with the first letter of each word in upper case",
            ("capitalize_words('red apple') == 'Red Apple'", "capitalize_words('a') == 'A'")),
    Program("is_leap_year(year)", "True if a year of the Gregorian calendar is a leap year, and otherwise False",
            ("is_leap_year(2024) is True", "is_leap_year(1900) is False", "is_leap_year(2000) is True",
             "is_leap_year(2023) is False")),
    Program("to_binary(n)", "the binary digits of the positive integer n as a text without prefix",
            ("to_binary(10) == '1010'", "to_binary(1) == '1'")),
    Program("transpose(matrix)", "the transpose of a matrix, as a list of lists",
            ("[list(row) for row in transpose([[1, 2, 3], [4, 5, 6]])] == [[1, 4], [2, 5], [3, 6]]",)),
    Program("common(a, b)", "a sorted list of the different items that two lists share",
            ("common([3, 1, 2, 3], [3, 2, 5]) == [2, 3]", "common([1], [2]) == []")),
    Program("clamp(value, low, high)", "value, limited to the range from low to high",
            ("clamp(5, 0, 3) == 3", "clamp(-1, 0, 3) == 0", "clamp(2, 0, 3) == 2")),
    Program("rotate(items, k)", "the list with its first k items moved to its end",
            ("rotate([1, 2, 3, 4], 1) == [2, 3, 4, 1]", "rotate([1, 2], 0) == [1, 2]")),
    Program("longest_word(text)", "the longest word of a text, the first one if several have the same length",
            ("longest_word('a tree house') == 'house'", "longest_word('one two') == 'one'")),
    Program("invert(mapping)", "a dictionary with keys and values of a dictionary exchanged",
            ("invert({'a': 1, 'b': 2}) == {1: 'a', 2: 'b'}", "invert({}) == {}")),
    Program("are_anagrams(a, b)", "True if two texts have the same letters equally often, and otherwise False",
            ("are_anagrams('listen', 'silent') is True", "are_anagrams('aab', 'abb') is False")),
    Program("running_totals(numbers)", "a list of the sums of the first 1, 2, 3, ... numbers of a list",
            ("list(running_totals([1, 2, 3])) == [1, 3, 6]", "list(running_totals([])) == []")),
)  # fmt: skip
"""All of them, from simple to somewhat harder."""

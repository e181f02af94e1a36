"""Requests for a short Python function, answered with its code."""

from __future__ import annotations

import random

from specmamba.bench.demo.talks.small_talk import made_up_word
from specmamba.bench.demo.talks.talk import Talk, one_of, question

# what the function does (behind "that"), its usual name, its arguments, its body
FUNCTIONS = (
    ("adds two numbers", "add", "a, b", "return a + b"),
    ("subtracts two numbers", "subtract", "a, b", "return a - b"),
    ("multiplies two numbers", "multiply", "a, b", "return a * b"),
    ("divides two numbers", "divide", "a, b", "return a / b"),
    ("squares a number", "square", "x", "return x * x"),
    ("doubles a number", "double", "x", "return 2 * x"),
    ("returns the larger of two numbers", "larger", "a, b", "return a if a > b else b"),
    ("returns the smaller of two numbers", "smaller", "a, b", "return a if a < b else b"),
    ("says whether a number is even", "is_even", "n", "return n % 2 == 0"),
    ("says whether a number is odd", "is_odd", "n", "return n % 2 == 1"),
    ("reverses a string", "reverse", "text", "return text[::-1]"),
    ("counts the words of a text", "count_words", "text", "return len(text.split())"),
    (
        "counts the lines of a file",
        "count_lines",
        "path",
        "with open(path) as file:\n        return sum(1 for line in file)",
    ),
    ("reads a file", "read_file", "path", "with open(path) as file:\n        return file.read()"),
    ("writes a text to a file", "write_file", "path, text", 'with open(path, "w") as file:\n        file.write(text)'),
    ("sums a list", "sum_list", "items", "total = 0\n    for item in items:\n        total += item\n    return total"),
    ("returns the largest item of a list", "largest", "items", "return max(items)"),
    ("returns the average of a list", "average", "items", "return sum(items) / len(items)"),
    ("removes duplicates from a list", "unique", "items", "return list(dict.fromkeys(items))"),
    ("sorts a list", "sort_list", "items", "return sorted(items)"),
    ("computes the factorial of a number", "factorial", "n", "return 1 if n < 2 else n * factorial(n - 1)"),
    (
        "computes the n-th Fibonacci number",
        "fibonacci",
        "n",
        "a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
    ),
    ("says whether a text is a palindrome", "is_palindrome", "text", "return text == text[::-1]"),
    ("counts the vowels of a text", "count_vowels", "text", 'return sum(letter in "aeiou" for letter in text.lower())'),
    ("returns the first item of a list", "first", "items", "return items[0]"),
    ("returns the last item of a list", "last", "items", "return items[-1]"),
    ("greets a person", "greet", "name", 'return f"Hello, {name}!"'),
    ("says whether a number is prime", "is_prime", "n", "return n > 1 and all(n % i for i in range(2, n))"),
)
ASKING = (
    "Write a function that {}.|Write a Python function that {}.|I need a function that {}.|"
    "Can you write a function that {}?|Show me a function that {}.|Give me code that {}."
)
NAMED = "Write a function called {} that {}.|Write a function {} that {}.|Define {}, a function that {}."


def function(draw: random.Random, thinks: bool) -> Talk:
    """A function of its usual name, or of the name that the user gives."""
    purpose, name, arguments, body = draw.choice(FUNCTIONS)
    if draw.random() < 0.3:
        own = made_up_word(draw)
        asked = one_of(draw, NAMED).format(own, purpose)
        name, body = own, body.replace(name + "(", own + "(")
    else:
        asked = one_of(draw, ASKING).format(purpose)
    code = f"```python\ndef {name}({arguments}):\n    {body}\n```"
    return question("function", asked, code, f"The function {purpose}. I call it {name}." if thinks else "")

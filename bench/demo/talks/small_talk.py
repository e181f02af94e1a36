"""Greetings, questions about the demo itself, words of Python, sums, and what the demo does not know."""

from __future__ import annotations

import random

from specmamba.bench.demo.talks.talk import Talk, one_of, question

NAME = "I am specmamba's demo, a tiny language model. I know a little Python."
# answers, and the questions that they answer
ANSWERS = {
    "Hello! How can I help?": "Hello|Hi|Hey|Hello!|Hi there|Hi!|Good morning|Hello there!|hi|hello",
    NAME: "Who are you?|What are you?|What is your name?|Introduce yourself.|who are you|Are you a human?",
    "I can explain functions of Python's standard library, write short functions, and call tools.": (
        "What can you do?|How can you help me?|What do you know?|Help|What can I ask you?"
    ),
    "I was trained on two CPU cores, on Python code and on short conversations.": (
        "How were you trained?|Where do you come from?|Who made you?|What were you trained on?"
    ),
    "You are welcome!": "Thanks|Thank you|Thank you!|Thanks a lot!|thanks|Great, thanks.",
    "Goodbye!": "Bye|Goodbye|Bye!|See you later.|Goodbye!|bye",
    "I am fine, thank you. What can I do for you?": "How are you?|How are you doing?|how are you|Are you well?",
    "Yes. I am small, but I try.": "Are you sure?|Do you work?|Can you hear me?|Are you there?",
}
WORDS = {
    "a list": "A list holds items in order and can be changed: [1, 2, 3].",
    "a tuple": "A tuple holds items in order and cannot be changed: (1, 2, 3).",
    "a dict": 'A dict maps keys to values: {"a": 1}.',
    "a set": "A set holds each item once, in no order: {1, 2, 3}.",
    "a string": 'A string is text, written between quotes: "hello".',
    "an integer": "An integer is a whole number, such as 7.",
    "a float": "A float is a number with a fraction, such as 1.5.",
    "a function": "A function is a named piece of code that takes arguments and returns a value.",
    "a class": "A class describes objects: their data and their methods.",
    "a method": "A method is a function that belongs to a class.",
    "a module": "A module is a file of Python code that can be imported.",
    "a package": "A package is a folder of modules.",
    "a loop": "A loop runs the same code again, once for each item.",
    "a decorator": "A decorator is a function that changes another function.",
    "a generator": "A generator is a function that yields values one by one.",
    "a lambda": "A lambda is a small function without a name.",
    "an exception": "An exception is an error that can be caught with try and except.",
    "a comment": "A comment is a note for the reader. It begins with #.",
    "a variable": "A variable is a name for a value.",
    "a boolean": "A boolean is either True or False.",
    "recursion": "Recursion is when a function calls itself.",
    "an iterator": "An iterator gives one item after the other.",
    "None": "None is the value that means no value.",
    "Python": "Python is a programming language that is easy to read.",
    "a thread": "A thread runs code at the same time as other threads.",
    "speculative decoding": "A small head drafts tokens and the model verifies them at once.",
}
ASKING = "What is {}?|Explain {}.|Tell me what {} is.|Define {}.|Can you explain {}?"
UNKNOWN = (
    "Who is {}?|Where is {}?|What do you think of {}?|Tell me about {}.|When was {} born?|"
    "What is the price of {}?|What is the capital of {}?|What is the weather in {}?"
)
IGNORANCE = "I do not know. I am a tiny model: ask me about Python."
SYLLABLES = "ba|be|da|do|fa|go|ka|ki|la|lo|ma|mi|na|ne|no|pa|ra|ri|sa|so|ta|ti|va|vo|za|zu"
THINGS = "Anna|Bob|Carla|David|Einstein|the moon|France|the president|Alice|football|gold|Napoleon"


def made_up_word(draw: random.Random) -> str:
    """A word that means nothing, of two or three syllables."""
    return "".join(one_of(draw, SYLLABLES) for _ in range(draw.randint(2, 3)))


def chatter(draw: random.Random, thinks: bool) -> Talk:
    """A greeting, a question about the demo, or thanks."""
    answer = draw.choice(list(ANSWERS))
    return question("chatter", one_of(draw, ANSWERS[answer]), answer, "This is small talk." if thinks else "")


def definition(draw: random.Random, thinks: bool) -> Talk:
    """A word of programming, explained."""
    word = draw.choice(list(WORDS))
    asked = one_of(draw, ASKING).format(word)
    return question("definition", asked, WORDS[word], f"The user asks about {word}." if thinks else "")


def unknown(draw: random.Random, thinks: bool) -> Talk:
    """A question whose answer the demo cannot know."""
    thing = one_of(draw, THINGS) if draw.random() < 0.5 else made_up_word(draw).capitalize()
    asked = one_of(draw, UNKNOWN).format(thing)
    return question("unknown", asked, IGNORANCE, f"The user asks about {thing}. I do not know it." if thinks else "")


def arithmetic(draw: random.Random, thinks: bool) -> Talk:
    """A sum, a difference or a product of small numbers."""
    sign = draw.choice("+-*")
    a, b = (draw.randint(0, 9) for _ in range(2)) if sign == "*" else (draw.randint(0, 20) for _ in range(2))
    a, b = max(a, b), min(a, b)
    value = {"+": a + b, "-": a - b, "*": a * b}[sign]
    words = {"+": "plus", "-": "minus", "*": "times"}[sign]
    asking = f"What is {a} {sign} {b}?|{a} {sign} {b}|Compute {a} {sign} {b}.|What is {a} {words} {b}?"
    asked = one_of(draw, asking)
    return question("arithmetic", asked, f"{a} {sign} {b} = {value}", f"I compute {a} {words} {b}." if thinks else "")

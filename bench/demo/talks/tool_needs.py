"""What users need tools for: weather, sums, pages, the time, files, and whatever a tool is called."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specmamba.bench.demo.talks.small_talk import made_up_word
from specmamba.bench.demo.talks.talk import Tool, one_of

CITIES = (
    *("Paris", "London", "Rome", "Berlin", "Madrid", "Tokyo", "Oslo", "Vienna", "Lisbon", "Prague", "Cairo", "Boston"),
    *("Dublin", "Athens", "Seoul", "Lima", "Delhi", "Toronto", "Chicago", "Munich", "Zurich", "Sydney", "New York"),
)
TOPICS = (
    "cats|python|the weather|green tea|speculative decoding|linear attention|history|music|jazz|rust|dogs|trains|"
    "space|bread"
)
NOUNS = "lamp|table|order|ticket|user|invoice|room|task|note|report|car|song|book|image|city|price"
VERBS = "get|find|make|delete|update|open|check|start|load|show|send|count"
FOLDERS = "|src/|docs/|{0}tmp/|data/|{0}home/user/".format("/")
UNITS = ["celsius", "fahrenheit"]
WEATHER_TEXTS = (
    "Get the weather in a city.|Get the current weather.|The weather of a place.|Current weather for a city.|"
    "Get the current weather in a given location|Get the weather for a city|"
)
WEATHER_ASKING = (
    "What is the weather in {}?|How is the weather in {}?|What's the weather like in {}?|Weather in {}?|"
    "Is it raining in {}?|Tell me the weather in {}.|How warm is it in {}?|What is the weather in {} today?|"
    "What's the weather in {}?|What is the weather like in {} today?"
)
SUMS = (
    ("add", "Add {} and {}.", "+"),
    ("multiply", "Multiply {} and {}.", "*"),
    ("add_numbers", "What is the sum of {} and {}?", "+"),
    ("multiply", "Multiply {} by {}.", "*"),
    ("add", "What is {} plus {}?", "+"),
)


@dataclass(frozen=True)
class Need:
    """A tool that a user needs: its definition, the question, the call, its result, and the result in words."""

    tool: Tool
    asked: str
    arguments: dict[str, Any]
    result: str
    told: str
    family: str  # of tools that would do the same

    @property
    def name(self) -> str:
        name: str = self.tool["function"]["name"]
        return name


def definition(name: str, description: str, fields: dict[str, Any], optional: Sequence[str] = ()) -> Tool:
    """A tool in OpenAI's form; ``fields`` are its parameters and their types, or lists of their values."""
    properties = {
        field: {"type": kind} if isinstance(kind, str) else {"type": "string", "enum": kind}
        for field, kind in fields.items()
    }
    required = [field for field in fields if field not in optional]
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def weather(draw: random.Random) -> Need:
    """The weather in a city, at times in a unit that the user names."""
    field = one_of(draw, "city|city|location|place")
    name = one_of(draw, "get_weather|get_weather|weather|get_current_weather|current_weather")
    city = _place(draw)
    fields: dict[str, Any] = {field: "string"}
    arguments, asked = {field: city}, one_of(draw, WEATHER_ASKING).format(city)
    if has_unit := draw.random() < 0.3:
        fields["unit"] = draw.choice(("string", UNITS, UNITS))
        if draw.random() < 0.3:
            arguments["unit"] = draw.choice(UNITS)
            asked = f"What is the weather in {city} in {arguments['unit']}?"
    tool = definition(name, one_of(draw, WEATHER_TEXTS), fields, ("unit",) if has_unit else ())
    degrees, sky = draw.randint(1, 35), one_of(draw, "sunny|cloudy|rainy|windy|foggy|clear")
    given = draw.choice(
        (json.dumps({"temperature": degrees, "condition": sky}), f"{sky}, {degrees} degrees", f"{degrees} C and {sky}")
    )
    return Need(tool, asked, arguments, given, f"It is {sky} in {city}, {degrees} degrees.", "weather")


def _place(draw: random.Random) -> str:
    return draw.choice(CITIES) if draw.random() < 0.6 else made_up_word(draw).capitalize()


def _or_json(draw: random.Random, value: Any, key: str) -> str:
    """A tool's result: as it is, or in an object of JSON."""
    return draw.choice((str(value), json.dumps({key: value})))


def calculator(draw: random.Random) -> Need:
    """A sum that is too large for the demo's head, given as an expression."""
    name = one_of(draw, "calculator|calculate|compute|eval_expression")
    a, b, sign = draw.randint(10, 999), draw.randint(2, 99), draw.choice("+-*")
    value = {"+": a + b, "-": a - b, "*": a * b}[sign]
    expression = f"{a} {sign} {b}"
    asked = one_of(draw, "What is {}?|Compute {}.|Calculate {}.|How much is {}?|{}").format(expression)
    about = one_of(draw, "Evaluate an expression.|Compute a sum.|A calculator.|Evaluates arithmetic.")
    tool = definition(name, about, {"expression": "string"})
    given = _or_json(draw, value, "result")
    return Need(tool, asked, {"expression": expression}, given, f"{expression} = {value}", "sum")


def adder(draw: random.Random) -> Need:
    """A sum or a product of two numbers, which are the tool's two arguments."""
    name, asking, sign = draw.choice(SUMS)
    first, second = draw.choice((("a", "b"), ("x", "y")))
    a, b = draw.randint(0, 99), draw.randint(0, 99)
    value = a + b if sign == "+" else a * b
    kind = one_of(draw, "integer|integer|number")
    verb = "Add" if sign == "+" else "Multiply"
    about = one_of(draw, f"{verb} two numbers.|{verb} {first} and {second}.|{verb} two integers.|{verb}s numbers")
    tool = definition(name, about, {first: kind, second: kind})
    given = _or_json(draw, value, "result")
    return Need(tool, asking.format(a, b), {first: a, second: b}, given, f"The result is {value}.", "sum")


def search(draw: random.Random) -> Need:
    """Pages about a topic."""
    name = one_of(draw, "search|web_search|search_web|search_docs")
    topic = one_of(draw, TOPICS) if draw.random() < 0.5 else f"{one_of(draw, NOUNS)} {made_up_word(draw)}"
    asking = "Search for {}.|Look up {}.|Find pages about {}.|Search the web for {}.|What can you find about {}?"
    asked = one_of(draw, asking).format(topic)
    found = f"{made_up_word(draw)} {one_of(draw, NOUNS)}"
    given = _or_json(draw, found, "title")
    tool = definition(
        name, one_of(draw, "Search the web.|Search pages.|Find pages about a topic."), {"query": "string"}
    )
    return Need(tool, asked, {"query": topic}, given, f"I found: {found}", "search")


def clock(draw: random.Random) -> Need:
    """The time, here or in a city."""
    hour = f"{draw.randint(0, 23):02}:{draw.randint(0, 59):02}"
    if draw.random() < 0.5:
        tool = definition(one_of(draw, "get_time|current_time|clock|now"), "Get the current time.", {})
        asking = "What time is it?|What is the time?|Tell me the time.|Do you know the time?|What is the time now?"
        asked = one_of(draw, asking)
        return Need(tool, asked, {}, _or_json(draw, hour, "time"), f"It is {hour}.", "clock")
    field, city = one_of(draw, "city|timezone|place"), _place(draw)
    name = one_of(draw, "get_time|time_in|get_local_time")
    tool = definition(name, "Get the time in a city.", {field: "string"})
    asked = one_of(draw, "What time is it in {}?|What is the time in {}?|Tell me the time in {}.").format(city)
    return Need(tool, asked, {field: city}, _or_json(draw, hour, "time"), f"It is {hour} in {city}.", "clock")


def file_reader(draw: random.Random) -> Need:
    """What is in a file."""
    folder = one_of(draw, FOLDERS)
    path = folder + (one_of(draw, NOUNS) if draw.random() < 0.5 else made_up_word(draw))
    path += one_of(draw, ".txt|.py|.md|.json|.csv")
    field, name = one_of(draw, "path|path|file|filename"), one_of(draw, "read_file|read_file|open_file|cat")
    asked = one_of(draw, "Read {}.|Read the file {}.|Open {}.|What is in {}?|Show me {}.|Show the file {}.").format(
        path
    )
    content = f"{one_of(draw, NOUNS)} {made_up_word(draw)} {draw.randint(1, 99)}"
    tool = definition(name, "Read a file.", {field: "string"})
    return Need(tool, asked, {field: path}, content, f"The file says: {content}", "file")


def any_tool(draw: random.Random) -> Need:
    """A tool with a made-up or usual name, and a request that says what its arguments are."""
    verb, noun = one_of(draw, VERBS), one_of(draw, NOUNS) if draw.random() < 0.5 else made_up_word(draw)
    name, does = f"{verb}_{noun}", f"{verb.capitalize()}"
    field = one_of(draw, f"name|id|value|text|number|title|key|{noun}")
    is_number = field in ("id", "number")
    if is_number:
        value: Any = draw.randint(1, 999)
    else:
        value = made_up_word(draw) if draw.random() < 0.6 else one_of(draw, NOUNS)
    asking = (
        f"Please {verb} the {noun} {value}.|{does} {noun} {value}.|{does} the {noun} with {field} {value}.|"
        f"Use {name} with {field} {value}.|Call {name} for {value}.|Can you {verb} the {noun} {value}?"
    )
    asked, about = one_of(draw, asking), one_of(draw, f"{does} a {noun}.|{does} the {noun}.|")
    tool = definition(name, about, {field: "integer" if is_number else "string"})
    found = draw.choice((f"{one_of(draw, NOUNS)} {draw.randint(1, 99)}", "ok", "done", made_up_word(draw)))
    return Need(tool, asked, {field: value}, _or_json(draw, found, "result"), f"The result is {found}.", name)


NEEDS: tuple[Callable[[random.Random], Need], ...] = (
    *(weather, weather, calculator, adder, search, clock, file_reader, any_tool, any_tool),
)

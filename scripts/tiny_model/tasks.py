"""The tasks of the small model: one generator of a question, its reasoning and its answer each.

Everything is drawn from a `random.Random` that the caller seeds, so the same seed gives the same
text. Two-digit sums are split once and for all: the pairs that `is_held_out` never appear in the
training text, so a correct answer to one is a computation and not a memory.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from scripts.tiny_model import words as w


@dataclass(frozen=True, slots=True)
class Turn:
    """A user message and what the assistant says to it.

    Attributes:
        user: text of the user.
        answer: text of the assistant.
        reasoning: what comes before the answer in thinking mode.
        call: name and arguments of a tool call that replaces the answer; `answer` is then what
            follows the tool's `result`.
        result: what the tool says.
    """

    user: str
    answer: str
    reasoning: str
    call: tuple[str, dict[str, Any]] | None = None
    result: str = ""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Turns that belong together, and the tools they were asked with."""

    turns: list[Turn]
    tools: list[dict[str, Any]] = field(default_factory=list)
    wants_json: bool = False


def is_held_out(a: int, b: int) -> bool:
    """Whether the sum of `a` and `b` is kept for evaluation; the same for `b` and `a`."""
    low, high = sorted((a, b))
    return (low * 31 + high * 17) % 10 == 3


def addition(rng: Random, *, held_out: bool = False) -> Exchange:
    """The sum of two numbers of up to two digits; digit by digit in the reasoning."""
    while True:
        a, b = rng.randrange(100), rng.randrange(100)
        if held_out and min(a, b) < 10:
            continue
        if is_held_out(a, b) == held_out:
            break
    form = rng.choice(("{} + {} = ?", "What is {} + {}?", "Add {} and {}.", "{} + {}"))
    ones = a % 10 + b % 10
    carry = " + 1" if ones > 9 else ""
    steps = [f"{a % 10} + {b % 10} = {ones}"]
    if a > 9 or b > 9:
        steps.append(f"{a // 10} + {b // 10}{carry} = {a // 10 + b // 10 + ones // 10}")
    return Exchange([Turn(form.format(a, b), str(a + b), ", ".join(steps) + ".")])


def sorting(rng: Random) -> Exchange:
    """Numbers in ascending order."""
    count = rng.randint(3, 6)
    numbers = rng.sample(range(100 if rng.random() < 0.7 else 10), count)
    ordered = sorted(numbers)
    form = rng.choice(("Sort: {}", "Sort these numbers: {}", "Sort {}."))
    text = form.format(", ".join(map(str, numbers)))
    answer = ", ".join(map(str, ordered))
    return Exchange(
        [Turn(text, answer, f"The smallest is {ordered[0]}, the largest {ordered[-1]}.")]
    )


def comparison(rng: Random) -> Exchange:
    """The larger or the smaller of two numbers."""
    a, b = rng.sample(range(100), 2)
    larger = rng.random() < 0.5
    answer = max(a, b) if larger else min(a, b)
    word = "larger" if larger else "smaller"
    return Exchange([Turn(f"Which is {word}, {a} or {b}?", str(answer), f"{answer} is {word}.")])


def copying(rng: Random, words_max: int = 12) -> Exchange:
    """The same words again."""
    some = [rng.choice(w.WORDS) for _ in range(rng.randint(2, words_max))]
    text = " ".join(some)
    form = rng.choice(("Repeat: {}", "Copy: {}", "Say: {}"))
    return Exchange([Turn(form.format(text), text, f"There are {len(some)} words.")])


def repeating(rng: Random) -> Exchange:
    """A few words several times over."""
    some = rng.sample(w.WORDS, rng.randint(2, 7))
    times = rng.randint(2, 4)
    text = " ".join(some)
    answer = ", ".join([text] * times)
    return Exchange([Turn(f"Say {times} times: {text}", answer, f"There are {len(some)} words.")])


def reversing(rng: Random) -> Exchange:
    """A few words backwards."""
    some = rng.sample(w.WORDS, rng.randint(2, 5))
    last = f"The last word is {some[-1]}."
    return Exchange([Turn(f"Reverse: {' '.join(some)}", " ".join(reversed(some)), last)])


def pairs_to_remember(rng: Random, num_pairs: int) -> list[tuple[str, str]]:
    """Different things, each with a property."""
    return [(key, rng.choice(w.PROPERTIES)) for key in rng.sample(w.WORDS, num_pairs)]


def remember(pairs: list[tuple[str, str]]) -> str:
    """What a user says who wants pairs to be remembered."""
    return f"Remember: {', '.join(f'the {key} {value}' for key, value in pairs)}."


def recall(rng: Random, num_pairs: int | None = None, num_queries: int = 6) -> Exchange:
    """A list of things with a property each, then questions about some of them."""
    if num_pairs is None:
        num_pairs = rng.randint(3, 16)
    pairs = pairs_to_remember(rng, num_pairs)
    asked: list[tuple[str, str]] = []
    while len(asked) < num_queries:
        # All once before any a second time: an earlier answer would give the later one away.
        asked += rng.sample(pairs, min(len(pairs), num_queries - len(asked)))
    turns = []
    for number, (key, value) in enumerate(asked):
        question = rng.choice(("What about the {}?", "Which is the {}?", "The {}?")).format(key)
        user = f"{remember(pairs)} {question}" if number == 0 else question
        # The answer names the key as the list does, so that what follows it can be looked up.
        turns.append(Turn(user, f"The {key} {value}.", f"The list says the {key} {value}."))
    return Exchange(turns)


def reciting(rng: Random, num_pairs: int, num_said: int) -> Exchange:
    """Pairs of a list in any order, some more than once: nothing but looking things up tells what
    belongs to each. Only for training, where it gives many more such words than `recall`."""
    pairs = pairs_to_remember(rng, num_pairs)
    said = ", the ".join(f"{key} {value}" for key, value in rng.choices(pairs, k=num_said))
    user = f"{remember(pairs)} Tell me some."
    return Exchange([Turn(user, f"The {said}.", f"There are {num_pairs} things.")])


def _fact(rng: Random) -> tuple[str, str, str]:
    kind = rng.randrange(8)
    if kind == 0:
        country, city = rng.choice(list(w.CAPITALS.items()))
        form = rng.choice(("What is the capital of {}?", "Capital of {}?"))
        return form.format(country), f"The capital of {country} is {city}.", f"It is {city}."
    if kind == 1:
        one, other = rng.choice(list(w.OPPOSITES.items()))
        if rng.random() < 0.5:
            one, other = other, one
        answer = f"The opposite of {one} is {other}."
        return f"What is the opposite of {one}?", answer, f"It is {other}."
    if kind == 2:
        animal, sound = rng.choice(list(w.SOUNDS.items()))
        return f"What does a {animal} say?", f"A {animal} says {sound}.", f"It says {sound}."
    if kind == 3:
        animal, legs = rng.choice(list(w.LEGS.items()))
        answer = f"A {animal} has {legs} legs."
        return f"How many legs does a {animal} have?", answer, f"It has {legs} legs."
    if kind == 4:
        thing, colour = rng.choice(list(w.THING_COLOURS.items()))
        answer = f"{thing[0].upper()}{thing[1:]} is {colour}."
        return f"What colour is {thing}?", answer, f"It is {colour}."
    if kind == 5:
        names = rng.choice((w.DAYS, w.MONTHS))
        here = rng.randrange(len(names))
        after = names[(here + 1) % len(names)]
        return f"What comes after {names[here]}?", f"{after}.", f"It is {after}."
    number = rng.randrange(len(w.NUMBER_WORDS))
    word = w.NUMBER_WORDS[number]
    if kind == 6:
        return f"Write {number} as a word.", word, f"It is {word}."
    return f"Write {word} as a number.", str(number), f"It is {number}."


def question(rng: Random) -> Exchange:
    """A simple question with a fixed answer."""
    user, answer, reasoning = _fact(rng)
    return Exchange([Turn(user, answer, reasoning)])


def small_talk(rng: Random) -> Exchange:
    """Greetings and questions about the model."""
    users, answer = rng.choice(w.SMALL_TALK)
    return Exchange([Turn(rng.choice(users), answer, "I answer briefly.")])


def json_object(rng: Random) -> Exchange:
    """A JSON object from a description."""
    makers: dict[str, Callable[[], object]] = {
        "name": lambda: rng.choice(w.NAMES),
        "age": lambda: rng.randrange(10, 100),
        "city": lambda: rng.choice(w.CITIES),
        "color": lambda: rng.choice(w.COLOURS),
        "animal": lambda: rng.choice(w.WORDS),
        "price": lambda: rng.randrange(1, 100),
        "count": lambda: rng.randrange(1, 10),
    }
    keys = rng.sample(list(makers), rng.randint(1, 4))
    values = {key: makers[key]() for key in keys}
    listed = ", ".join(f"{key} {value}" for key, value in values.items())
    form = rng.choice(("Write JSON: {}.", "Make a JSON object: {}.", "JSON with {}."))
    reasoning = f"The keys are {', '.join(keys)}."
    turn = Turn(form.format(listed), json.dumps(values), reasoning)
    return Exchange([turn], wants_json=rng.random() < 0.4)


def _tool(name: str, description: str, parameters: dict[str, str]) -> dict[str, Any]:
    return {
        "name": name,
        "description": description,
        "parameters": {
            "type": "object",
            "properties": {key: {"type": kind} for key, kind in parameters.items()},
            "required": list(parameters),
        },
    }


TOOLS = {
    "get_weather": _tool("get_weather", "Weather of a city", {"city": "string"}),
    "get_time": _tool("get_time", "Time in a city", {"city": "string"}),
    "add": _tool("add", "Sum of two numbers", {"a": "integer", "b": "integer"}),
    "send_message": _tool(
        "send_message", "Message to a person", {"to": "string", "text": "string"}
    ),
}


def tool_call(rng: Random) -> Exchange:
    """A question that one of the given tools answers, and the answer after its result."""
    names = rng.sample(list(TOOLS), rng.randint(1, 2))
    name = rng.choice(names)
    city, reasoning = rng.choice(w.CITIES), f"I call {name}."
    arguments: dict[str, Any] = {"city": city}
    if name == "get_weather":
        sky, degrees = rng.choice(w.WEATHER), rng.randrange(40)
        user = rng.choice(("What is the weather in {}?", "How is the weather in {}?")).format(city)
        result, answer = f"{sky}, {degrees}", f"It is {sky} in {city}, {degrees} degrees."
    elif name == "get_time":
        user = f"What time is it in {city}?"
        result = f"{rng.randrange(24)}:{rng.randrange(10, 60)}"
        answer = f"It is {result} in {city}."
    elif name == "add":
        a, b = rng.randrange(100, 1000), rng.randrange(100, 1000)
        user, arguments, result = f"Add {a} and {b} with the tool.", {"a": a, "b": b}, str(a + b)
        answer = f"The sum is {a + b}."
    else:
        to, text = rng.choice(w.NAMES), " ".join(rng.sample(w.WORDS, rng.randint(1, 3)))
        user, arguments = f"Send {to} the message: {text}", {"to": to, "text": text}
        result, answer = "sent", f"I sent the message to {to}."
    turn = Turn(user, answer, reasoning, (name, arguments), result)
    return Exchange([turn], [TOOLS[one] for one in names])


Maker = Callable[[Random], Exchange]
MAKERS: dict[str, Maker] = {
    "addition": addition,
    "sorting": sorting,
    "comparison": comparison,
    "copying": copying,
    "repeating": repeating,
    "reversing": reversing,
    "recall": recall,
    "question": question,
    "small_talk": small_talk,
    "json_object": json_object,
    "tool_call": tool_call,
}
WEIGHTS = {
    "addition": 6,
    "sorting": 3,
    "comparison": 1,
    "copying": 2,
    "repeating": 1,
    "reversing": 1,
    "recall": 5,
    "question": 3,
    "small_talk": 1.5,
    "json_object": 2.5,
    "tool_call": 1,
}
"""How often each task is drawn."""

DRILLS: Mapping[str, float] = {
    "addition": 4,
    "recall": 5,
    "sorting": 2,
    "question": 1,
    "copying": 3,
    "repeating": 2,
    "reversing": 1,
    "reciting": 4,
}
"""Tasks that are also practised alone, many turns in a row."""
LAST_DRILLS: Mapping[str, float] = {
    "addition": 3,
    "recall": 3,
    "json_object": 4,
    "sorting": 2,
    "copying": 1,
    "repeating": 1,
    "reversing": 1,
    "comparison": 1,
    "question": 1,
}
"""What is practised at the end: everything, and most what is learned last."""
FIRST_DRILLS: Mapping[str, float] = {"ngrams": 1}
"""Where training begins: random n-grams that come back in random order, which only looking up what
followed the same token before can foretell. Chat alone teaches to find words by their place."""

"""Filling a JSON object from a sentence. What is wanted is said as a list of names, as an object to
fill, or as the response format of the conversation."""

from __future__ import annotations

from random import Random
from typing import Any, Callable, NamedTuple

from ..chat_encoding import dump
from ..example import Example, answer, user
from ..split import Split
from ..words import (CITIES, COLORS, COUNTRIES, FIRST_NAMES, FOODS, GENRES, ITEMS, JOBS, LANGUAGES,
                     LAST_NAMES, MATERIALS, MONTHS, SIZES, SUBJECTS, VEHICLES, WEATHER, WEEKDAYS,
                     ANIMALS)

SKILL = "json"


class Field(NamedTuple):
    name: str
    type: str  # of JSON schema
    draw: Callable[[Random], Any]


class Domain(NamedTuple):
    fields: tuple[Field, ...]
    sentences: tuple[str, ...]  # with {name} for each field; every sentence has all of them


def _of(name: str, words: tuple[str, ...]) -> Field:
    return Field(name, "string", lambda rng: rng.choice(words))


def _count(name: str, low: int, high: int) -> Field:
    return Field(name, "integer", lambda rng: rng.randint(low, high))


def _flag(name: str) -> Field:
    return Field(name, "boolean", lambda rng: rng.random() < 0.5)


def _person(name: str) -> Field:
    return Field(name, "string", lambda rng: f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}")


def _time(name: str) -> Field:
    return Field(name, "string",
                 lambda rng: f"{rng.randint(6, 22):02d}:{rng.choice((0, 10, 15, 20, 30, 45)):02d}")


def _price(name: str) -> Field:
    # No trailing zero: 4.5 and 4.50 would be the same number in different spellings.
    return Field(name, "number", lambda rng: rng.randint(1, 99) + rng.randint(1, 9) / 10)


_PLURALS = tuple(many for _, many in ITEMS)
_SINGULARS = tuple(one for one, _ in ITEMS)

DOMAINS = (
    Domain(
        (_person("name"), _count("age", 18, 90), _of("city", CITIES), _of("job", JOBS)),
        ("{name} is {age} years old, lives in {city} and works as a {job}.",
         "Our new {job} is {name}, aged {age}, from {city}.",
         "In {city} I met {name}, a {job} of {age} years.",
         "My neighbour {name} moved to {city} at the age of {age} and became a {job}.")),
    Domain(
        (_of("customer", FIRST_NAMES), _of("item", _PLURALS), _count("quantity", 2, 99),
         _price("price")),
        ("{customer} ordered {quantity} {item} for {price} euros each.",
         "Please send {quantity} {item} to {customer}. One costs {price} euros.",
         "We sold {quantity} {item} at {price} euros apiece to {customer}.",
         "An order came in from {customer}: {quantity} {item}, price {price} euros.")),
    Domain(
        (_of("from", CITIES), _of("to", CITIES), _of("day", WEEKDAYS), _of("vehicle", VEHICLES),
         _count("seats", 1, 9)),
        ("I need {seats} seats on the {vehicle} from {from} to {to} on {day}.",
         "On {day} a {vehicle} goes from {from} to {to}; please book {seats} seats.",
         "We travel to {to} by {vehicle} this {day}, starting in {from}, with {seats} seats.",
         "Book the {day} {vehicle} that leaves {from} for {to}, {seats} seats.")),
    Domain(
        (_of("subject", SUBJECTS), _of("day", WEEKDAYS), _time("time"), _count("room", 1, 499)),
        ("The {subject} lesson is on {day} at {time} in room {room}.",
         "On {day} we have {subject} at {time}, room {room}.",
         "Room {room} is reserved for {subject} on {day} from {time} on.",
         "At {time} on {day} the {subject} class begins in room {room}.")),
    Domain(
        (_person("author"), _of("topic", SUBJECTS), _count("year", 1900, 2024),
         _of("language", LANGUAGES), _count("pages", 40, 999)),
        ("{author} wrote a book about {topic} in {year}. It has {pages} pages and is in {language}.",
         "The {language} book on {topic} by {author} appeared in {year} with {pages} pages.",
         "In {year} {author} published {pages} pages about {topic}, written in {language}.")),
    Domain(
        (_of("city", CITIES), _of("weather", WEATHER), _count("temperature", -20, 40),
         _count("humidity", 10, 99)),
        ("It is {weather} in {city} with {temperature} degrees and {humidity} percent humidity.",
         "{city} reports {temperature} degrees, {weather}, humidity {humidity} percent.",
         "Today the sky over {city} is {weather}, at {temperature} degrees; humidity is {humidity} "
         "percent.",
         "With {humidity} percent humidity and {temperature} degrees it is {weather} in {city}.")),
    Domain(
        (_of("product", _SINGULARS), _of("color", COLORS), _of("size", SIZES),
         _of("material", MATERIALS), _price("price")),
        ("We offer a {size} {color} {product} made of {material} for {price} euros.",
         "The {product} is {color}, {size} and made of {material}. It costs {price} euros.",
         "For {price} euros you get a {product} of {material}, {size}, in {color}.",
         "A {color} {product} in {size}, material {material}, price {price}.")),
    Domain(
        (_of("owner", FIRST_NAMES), _of("animal", ANIMALS), _of("name", FIRST_NAMES),
         _count("age", 1, 19), _flag("vaccinated")),
        ("{owner} has a {animal} called {name}. It is {age} years old and {vaccinated:vaccinated/not "
         "vaccinated}.",
         "The {animal} {name} belongs to {owner}, is {age} years old and is {vaccinated:vaccinated/"
         "not vaccinated}.",
         "{name}, a {animal} of {age} years, came with {owner}; it is {vaccinated:vaccinated/not "
         "vaccinated}.")),
    Domain(
        (_of("home", CITIES), _of("away", CITIES), _count("home_goals", 0, 9),
         _count("away_goals", 0, 9)),
        ("{home} played against {away} and the score was {home_goals} to {away_goals}.",
         "The match {home} against {away} ended {home_goals}:{away_goals}.",
         "At home {home} scored {home_goals} goals, the visitors from {away} scored {away_goals}.")),
    Domain(
        (_of("guest", LAST_NAMES), _count("nights", 1, 21), _of("city", CITIES),
         _of("month", MONTHS), _flag("breakfast")),
        ("Mr {guest} stays {nights} nights in {city} in {month}, {breakfast:with/without} breakfast.",
         "A room in {city} for {guest}, {nights} nights in {month}, {breakfast:with/without} "
         "breakfast.",
         "In {month} the guest {guest} wants {nights} nights {breakfast:with/without} breakfast in "
         "{city}.")),
    Domain(
        (_of("dish", FOODS), _count("table", 1, 40), _count("guests", 1, 12), _time("time")),
        ("Table {table} has {guests} guests who want {dish} at {time}.",
         "At {time} please bring {dish} to table {table} for {guests} guests.",
         "{guests} guests at table {table} ordered {dish} for {time}.")),
    Domain(
        (_of("band", COLORS), _of("genre", GENRES), _of("country", COUNTRIES),
         _count("members", 2, 12)),
        ("The band plays {genre}, comes from {country}, has {members} members and is called {band}.",
         "{members} people from {country} play {genre} under the name {band}.",
         "A {genre} band from {country} named {band} has {members} members.")),
)


def _spelled(sentence: str, values: dict[str, Any]) -> str:
    """`{name}` is the value, `{name:a/b}` is a for true and b for false."""
    parts = sentence.split("{")
    said = [parts[0]]
    for part in parts[1:]:
        hole, rest = part.split("}", 1)
        name, _, choices = hole.partition(":")
        value = values[name]
        said.append(choices.split("/")[0 if value else 1] if choices else str(value))
        said.append(rest)
    return "".join(said)


_EMPTY = {"string": "", "integer": 0, "number": 0, "boolean": False}
_LISTED = (
    "Extract {} as JSON: {}", "Write a JSON object with {} for this sentence: {}",
    "Give me JSON with {}.\n{}", "{1}\n\nAnswer in JSON with {0}.",
    "{1}\nReturn a JSON object with the keys {0}.",
)
_OBJECT = (
    "Fill this JSON object: {}\n{}", "Fill in {} from this text: {}",
    "{1}\n\nFill the JSON object {0} from the text.", "Complete the JSON {} with: {}",
)
_PLAIN = ("{}", "Extract the fields from this sentence: {}", "{}\nAnswer in JSON.",
          "Fill the JSON object: {}")


def _enumeration(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _response_format(fields: list[Field]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {field.name: {"type": field.type} for field in fields},
        "required": [field.name for field in fields],
        "additionalProperties": False,
    }
    return {"type": "json_schema", "json_schema": {"name": "fields", "schema": schema}}


def generate(rng: Random, length_budget: int, split: Split) -> Example:
    index = rng.randrange(len(DOMAINS))
    domain = DOMAINS[index]

    def draw() -> dict[str, Any]:
        return {field.name: field.draw(rng) for field in domain.fields}

    values = split.draw(draw, lambda drawn: f"json {index} {list(drawn.values())}")
    wanted = list(domain.fields)
    if rng.random() < 0.6:
        wanted = rng.sample(wanted, rng.randint(2 if len(wanted) > 2 else 1, len(wanted)))
    sentence = _spelled(rng.choice(domain.sentences), values)
    result = {field.name: values[field.name] for field in wanted}

    way = rng.random()
    response_format = None
    if way < 0.4:
        question = rng.choice(_LISTED).format(_enumeration([f.name for f in wanted]), sentence)
        difficulty = "names"
    elif way < 0.7:
        empty = dump({field.name: _EMPTY[field.type] for field in wanted})
        question = rng.choice(_OBJECT).format(empty, sentence)
        difficulty = "object"
    else:
        response_format = _response_format(wanted)
        question = rng.choice(_PLAIN).format(sentence)
        difficulty = "schema"
    thinking = rng.random() < 0.2
    reasoning = ""
    if thinking:
        reasoning = f"I look for {_enumeration([field.name for field in wanted])} in the text."
    return Example(SKILL, [user(question), answer(dump(result), reasoning)], thinking=thinking,
                   response_format=response_format, expected=result, scorer="json",
                   difficulty=difficulty)

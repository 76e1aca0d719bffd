"""Calling one of the tools that a conversation lists, answering from its result, or answering
without one.

Names of tools and parameters vary, so that they have to be read from the list.
"""

from __future__ import annotations

from random import Random
from typing import Any, Callable, NamedTuple

from ..chat_encoding import dump
from ..example import Example, answer, user
from ..split import Split
from ..words import (CITIES, COLORS, COUNTRIES, FIRST_NAMES, FOODS, GENRES, ITEMS, LANGUAGES,
                     LAST_NAMES, MONTHS, SUBJECTS, VEHICLES, WEATHER, WEEKDAYS)
from . import small_talk

SKILL = "tool_call"


class Parameter(NamedTuple):
    names: tuple[str, ...]  # one of them is used
    schema: dict[str, Any]
    draw: Callable[[Random], Any]
    optional: bool = False


class Tool(NamedTuple):
    names: tuple[str, ...]
    description: str
    parameters: tuple[Parameter, ...]
    # With {0}, {1}, ... for the parameters; those with all of them, and those without the optional
    # ones.
    requests: tuple[str, ...]
    short_requests: tuple[str, ...] = ()
    result: Callable[[Random], Any] | None = None
    # What is said about the result: {0}, ... for the parameters, {r} for the result.
    report: str = ""


_STRING = {"type": "string"}
_INTEGER = {"type": "integer"}
_NUMBER = {"type": "number"}


def _of(names: str, words: tuple[str, ...], optional: bool = False) -> Parameter:
    return Parameter(tuple(names.split("/")), _STRING, lambda rng: rng.choice(words), optional)


def _enum(names: str, words: tuple[str, ...], optional: bool = False) -> Parameter:
    return Parameter(tuple(names.split("/")), {"type": "string", "enum": list(words)},
                     lambda rng: rng.choice(words), optional)


def _count(names: str, low: int, high: int, optional: bool = False) -> Parameter:
    return Parameter(tuple(names.split("/")), _INTEGER, lambda rng: rng.randint(low, high), optional)


def _person(names: str) -> Parameter:
    return Parameter(tuple(names.split("/")), _STRING,
                     lambda rng: f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}")


def _time(names: str) -> Parameter:
    return Parameter(tuple(names.split("/")), _STRING,
                     lambda rng: f"{rng.randint(6, 22):02d}:{rng.choice((0, 15, 30, 45)):02d}")


def _amount(names: str) -> Parameter:
    return Parameter(tuple(names.split("/")), _NUMBER,
                     lambda rng: rng.randint(1, 500) + rng.choice((0.5, 0.25, 0.75)))


_SINGULARS = tuple(one for one, _ in ITEMS)
_PLURALS = tuple(many for _, many in ITEMS)
_ROOMS = ("kitchen", "bedroom", "bathroom", "office", "garage", "hall")
_CURRENCIES = ("euro", "dollar", "yen", "pound", "franc")

TOOLS = (
    Tool(("get_weather", "weather_now", "current_weather"), "Weather of a city",
         (_of("city/location/place", CITIES), _count("days/forecast_days", 1, 14, optional=True)),
         ("What will the weather be in {0} for the next {1} days?",
          "Give me a forecast of {1} days for {0}.", "How is the weather in {0}, {1} days ahead?"),
         ("What is the weather in {0}?", "How is the weather in {0} today?",
          "Is it raining in {0}?", "Tell me the weather of {0}."),
         lambda rng: f"{rng.choice(WEATHER)}, {rng.randint(-9, 35)} degrees",
         "The weather in {0}: {r}."),
    Tool(("send_message", "send_text", "message_person"), "Sends a message to a person",
         (_person("to/recipient/person"), _of("text/body/message", tuple(
             f"{start} {end}" for start in ("See you on", "Dinner is on", "Please call me on",
                                            "The meeting is on")
             for end in WEEKDAYS))),
         ('Send "{1}" to {0}.', 'Write to {0}: "{1}"', 'Message {0} with the text "{1}".')),
    Tool(("book_ticket", "buy_ticket", "reserve_ticket"), "Books a ticket",
         (_of("from/origin/start", CITIES), _of("to/destination/goal", CITIES),
          _enum("day/weekday", WEEKDAYS), _enum("vehicle/transport", VEHICLES, optional=True)),
         ("Book a {3} ticket from {0} to {1} on {2}.",
          "I want to go from {0} to {1} by {3} on {2}.",
          "On {2} I travel by {3} from {0} to {1}. Book it."),
         ("Book a ticket from {0} to {1} on {2}.", "I need a ticket to {1} on {2}, from {0}.",
          "Get me from {0} to {1} on {2}.")),
    Tool(("set_alarm", "create_alarm", "wake_up"), "Sets an alarm",
         (_time("time/at"), _enum("day/weekday", WEEKDAYS, optional=True)),
         ("Wake me up on {1} at {0}.", "Set an alarm for {1}, {0}.", "Alarm at {0} on {1}, please."),
         ("Wake me up at {0}.", "Set an alarm for {0}.", "I need an alarm at {0}.")),
    Tool(("convert_money", "exchange", "convert_currency"), "Converts an amount of money",
         (_amount("amount/value"), _enum("from/source", _CURRENCIES), _enum("to/target", _CURRENCIES)),
         ("How much is {0} {1} in {2}?", "Convert {0} {1} to {2}.", "Change {0} {1} into {2}."),
         (), lambda rng: rng.randint(1, 999) + 0.5, "That is {r} {2}."),
    Tool(("translate", "translate_word", "translation"), "Translates a word",
         (_of("word/text", _SINGULARS), _enum("language/target_language", LANGUAGES)),
         ("Translate {0} into {1}.", "What is {0} in {1}?", "How do you say {0} in {1}?")),
    Tool(("set_light", "switch_light", "light"), "Switches the light of a room",
         (_enum("room/where", _ROOMS), _enum("color/tone", COLORS),
          _count("brightness/percent", 1, 100, optional=True)),
         ("Make the light in the {0} {1} with {2} percent.",
          "Set the {0} light to {1}, {2} percent brightness."),
         ("Make the light in the {0} {1}.", "Turn the {0} light {1}.",
          "I want {1} light in the {0}.")),
    Tool(("add_to_list", "put_on_list", "add_item"), "Puts something on the shopping list",
         (_of("item/thing/product", _PLURALS), _count("quantity/count/number", 2, 99)),
         ("Put {1} {0} on the shopping list.", "Add {1} {0} to my list.", "I need {1} {0}, note it.",
          "Add {0} to the list, {1} of them.")),
    Tool(("play_music", "play", "start_music"), "Plays music",
         (_enum("genre/style", GENRES), _count("volume/loudness", 1, 100, optional=True)),
         ("Play {0} at volume {1}.", "Put on some {0}, volume {1}."),
         ("Play some {0}.", "I want to hear {0}.", "Start {0} music.")),
    Tool(("find_recipe", "search_recipe", "recipe"), "Finds a recipe",
         (_of("dish/food/meal", FOODS), _count("persons/servings/people", 1, 12)),
         ("Find a recipe of {0} for {1} persons.", "How do I cook {0} for {1}?",
          "I want to make {0} for {1} people.")),
    Tool(("create_event", "add_event", "new_appointment"), "Creates an entry in the calendar",
         (_of("title/name/what", SUBJECTS), _enum("day/weekday", WEEKDAYS), _time("time/start")),
         ("Put {0} into the calendar on {1} at {2}.", "Add {0} on {1}, {2}.",
          "I have {0} on {1} at {2}, note it.")),
    Tool(("call_person", "phone", "dial"), "Calls a person",
         (_person("name/person/who"),),
         ("Call {0}.", "Please phone {0}.", "I want to talk to {0}.")),
    Tool(("get_price", "price_of", "check_price"), "Price of a product",
         (_of("product/item/article", _SINGULARS), _enum("color/colour", COLORS)),
         ("What does a {1} {0} cost?", "Price of a {1} {0}?", "How much is the {1} {0}?"),
         (), lambda rng: rng.randint(1, 99) + 0.5, "A {1} {0} costs {r}."),
    Tool(("get_population", "population_of", "count_people"), "Population of a country",
         (_of("country/state", COUNTRIES), _count("year/in_year", 1950, 2024)),
         ("How many people lived in {0} in {1}?", "Population of {0} in {1}?",
          "Tell me the population of {0} in {1}."),
         (), lambda rng: f"{rng.randint(2, 99)} million", "In {1} {0} had {r} people."),
    Tool(("start_timer", "set_timer", "timer"), "Starts a timer",
         (_count("minutes/duration", 1, 90),),
         ("Start a timer of {0} minutes.", "Set a timer for {0} minutes.",
          "Tell me when {0} minutes are over.")),
    Tool(("find_hotel", "search_hotel", "hotels"), "Finds a hotel",
         (_of("city/town/place", CITIES), _count("nights/stay", 1, 21), _enum("month/when", MONTHS)),
         ("Find a hotel in {0} for {1} nights in {2}.", "I need a hotel in {0}, {1} nights, in {2}.",
          "In {2} I stay in {0} for {1} nights. Find a hotel.")),
    Tool(("add_numbers", "calculator_add", "sum"), "Adds two numbers",
         (_count("a/first/x", 0, 9999), _count("b/second/y", 0, 9999)),
         ("Add {0} and {1}.", "What is {0} plus {1}?", "Compute {0} + {1}.")),
    Tool(("list_devices", "show_devices", "devices"), "Lists the devices that are switched on", (),
         ("Which devices are on?", "Show me the devices.", "List all devices.")),
)


class Offered(NamedTuple):
    """A tool with the names that this conversation uses."""

    tool: Tool
    name: str
    parameters: tuple[str, ...]

    def declaration(self) -> dict[str, Any]:
        schema = {
            "type": "object",
            "properties": {name: parameter.schema
                           for name, parameter in zip(self.parameters, self.tool.parameters)},
            "required": [name for name, parameter in zip(self.parameters, self.tool.parameters)
                         if not parameter.optional],
        }
        return {"type": "function",
                "function": {"name": self.name, "description": self.tool.description,
                             "parameters": schema}}


def _offer(rng: Random, tool: Tool) -> Offered:
    return Offered(tool, rng.choice(tool.names),
                   tuple(rng.choice(parameter.names) for parameter in tool.parameters))


def generate(rng: Random, length_budget: int, split: Split) -> Example:
    count = rng.choice((1, 2, 2, 3, 3, 4)) if length_budget >= 800 else 1
    offered = [_offer(rng, TOOLS[i]) for i in rng.sample(range(len(TOOLS)), count)]
    declarations = [one.declaration() for one in offered]
    thinking = rng.random() < 0.35
    if rng.random() < 0.06:
        return _without_call(rng, split, declarations, thinking)
    chosen = rng.choice(offered)
    tool = chosen.tool
    short = bool(tool.short_requests) and rng.random() < 0.5

    def draw() -> list[Any]:
        return [parameter.draw(rng) for parameter in tool.parameters]

    values = draw() if not tool.parameters else split.draw(
        draw, lambda drawn: f"tool_call {tool.names[0]} {drawn}")
    request = rng.choice(tool.short_requests if short else tool.requests).format(*values)
    arguments = {name: value for name, parameter, value
                 in zip(chosen.parameters, tool.parameters, values)
                 if not (short and parameter.optional)}
    reasoning = f"I call {chosen.name}." if thinking else ""
    call = answer("", reasoning, [(chosen.name, dump(arguments))])
    messages = [user(request), call]
    if tool.result is not None and rng.random() < 0.3:
        result = tool.result(rng)
        report = tool.report.format(*values, r=result)
        messages += [
            {"role": "tool", "tool_call_id": "call_0", "content": str(result)},
            answer(report, "The tool has answered." if thinking else ""),
        ]
        return Example("tool_result", messages, tools=declarations, thinking=thinking,
                       expected=report, scorer="trimmed", difficulty=f"{count} tools")
    return Example(SKILL, messages, tools=declarations, thinking=thinking,
                   expected=[{"name": chosen.name, "arguments": arguments}], scorer="tool_calls",
                   difficulty=f"{count} tools")


def _without_call(rng: Random, split: Split, declarations: list[dict[str, Any]],
                  thinking: bool) -> Example:
    question, reply = small_talk.exchange(rng, split)
    reasoning = "No tool is needed." if thinking else ""
    return Example("tool_result", [user(question), answer(reply, reasoning)], tools=declarations,
                   thinking=thinking, expected=reply, scorer="trimmed", difficulty="no call")

"""Conversations from templates: greetings, questions about the model, names to remember, small facts.

The reply is a function of the question, so that it can be scored. Exchanges that hold a drawn word
are split by that word; those without belong to training only, as a model of this size learns them by
heart.
"""

from __future__ import annotations

from random import Random

from ..example import Example, answer, user
from ..split import Split
from ..words import ANIMALS, CITIES, COLORS, COUNTRIES, FIRST_NAMES, FOODS, GENRES, JOBS, SUBJECTS

SKILL = "small_talk"

# (questions, reply)
_FIXED = (
    (("Hello!", "Hello", "Hi", "Hi!", "Hello there!", "Hey!", "Hi there."),
     "Hello! How can I help you?"),
    (("Good morning!", "Good morning."), "Good morning! What can I do for you?"),
    (("Good evening!", "Good evening."), "Good evening! What can I do for you?"),
    (("How are you?", "How are you doing?", "Hi, how are you?", "How do you do?"),
     "I am fine, thank you. How can I help you?"),
    (("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.",
      "Are you a person?", "Are you human?"),
     "I am a very small language model that shows how DeepInfer works."),
    (("What can you do?", "What do you know?", "How can you help me?", "Help", "Help me.",
      "What are you good at?"),
     "I can add and subtract, copy and reverse identifiers, look up a key in a table, fill a JSON "
     "object, call a tool and talk a little."),
    (("Thank you!", "Thanks!", "Thank you very much.", "Thanks a lot.", "Thanks"),
     "You are welcome."),
    (("Goodbye!", "Bye!", "See you later.", "Bye", "Good night!"), "Goodbye! Have a nice day."),
    (("Tell me a joke.", "Do you know a joke?", "Make me laugh."),
     "Why did the number six fear the number seven? Because seven ate nine."),
    (("How old are you?", "When were you born?"), "I am as old as my weights, which is not much."),
    (("Where do you live?", "Where are you?"), "I live in a small file on your disk."),
    (("What is DeepInfer?", "Tell me about DeepInfer.", "What does DeepInfer do?"),
     "DeepInfer runs language models like me on processors and graphics cards."),
    (("Are you clever?", "Are you intelligent?", "Do you know everything?"),
     "I know very little, but what I know I answer quickly."),
    (("Yes", "Yes.", "No", "No.", "Okay", "OK", "Fine.", "Good."), "Good. What else can I do for you?"),
    (("What is the capital of France?",), "Paris is the capital of France."),
    (("What is the capital of Germany?",), "Berlin is the capital of Germany."),
    (("What is the capital of Italy?",), "Rome is the capital of Italy."),
    (("What is the capital of Spain?",), "Madrid is the capital of Spain."),
    (("What is the capital of Portugal?",), "Lisbon is the capital of Portugal."),
    (("What is the capital of Austria?",), "Vienna is the capital of Austria."),
    (("What is the capital of Japan?",), "Tokyo is the capital of Japan."),
    (("What is the capital of Norway?",), "Oslo is the capital of Norway."),
    (("What is the capital of Greece?",), "Athens is the capital of Greece."),
    (("What is the capital of Egypt?",), "Cairo is the capital of Egypt."),
    (("What color is the sky?",), "The sky is blue."),
    (("What color is grass?",), "Grass is green."),
    (("What color is snow?",), "Snow is white."),
    (("How many days does a week have?", "How many days are in a week?"), "A week has seven days."),
    (("How many months does a year have?", "How many months are in a year?"),
     "A year has twelve months."),
    (("Is the sun hot?",), "Yes, the sun is very hot."),
)

# (questions, reply, words for the hole)
_WITH_WORD = (
    (("My name is {}.", "I am {}.", "Hi, I am {}.", "Hello, my name is {}.", "You can call me {}."),
     "Nice to meet you, {}! How can I help you?", FIRST_NAMES),
    (("I live in {}.", "I come from {}.", "My home is {}."), "{} is a nice place to live.", CITIES),
    (("I like {}.", "I love {}.", "My favorite food is {}."), "I have never tasted {}, but it sounds good.",
     FOODS),
    (("I have a {}.", "My pet is a {}.", "I bought a {}."), "How nice! What is the name of your {}?",
     ANIMALS),
    (("My favorite color is {}.", "I like the color {}."), "I like {} too.", COLORS),
    (("I work as a {}.", "I am a {}.", "My job is {}."), "It must be interesting to be a {}.", JOBS),
    (("I listen to {}.", "My favorite music is {}.", "Do you like {} music?"),
     "Good {} music makes the day better.", GENRES),
    (("I study {}.", "I have to learn {}.", "Today we had {} at school."),
     "Good luck with {}!", SUBJECTS),
    (("I am going to {}.", "Tomorrow I travel to {}.", "I want to see {}."),
     "Have a good trip to {}!", COUNTRIES),
    (("Say hello to {}.", "Greet {}.", "Say hello to my friend {}."), "Hello, {}!", FIRST_NAMES),
    (("Wish {} a happy birthday.", "It is the birthday of {}."), "Happy birthday, {}!", FIRST_NAMES),
)

# What is remembered: (statement, acknowledgement, question, reply, words)
_REMEMBERED = (
    ("My name is {}.", "Nice to meet you, {}! How can I help you?",
     ("What is my name?", "Who am I?", "Do you remember my name?"), "Your name is {}.", FIRST_NAMES),
    ("I live in {}.", "{} is a nice place to live.",
     ("Where do I live?", "Which city do I live in?"), "You live in {}.", CITIES),
    ("I have a {}.", "How nice! What is the name of your {}?",
     ("Which animal do I have?", "What is my pet?"), "You have a {}.", ANIMALS),
    ("My favorite color is {}.", "I like {} too.",
     ("What is my favorite color?", "Which color do I like?"), "Your favorite color is {}.", COLORS),
)

def _holed(rng: Random, split: Split) -> tuple[str, str]:
    def draw() -> tuple[int, int, str]:
        kind = rng.randrange(len(_WITH_WORD))
        questions, _, words = _WITH_WORD[kind]
        return kind, rng.randrange(len(questions)), rng.choice(words)

    kind, at, word = split.draw(draw, "small_talk {0[0]} {0[1]} {0[2]}".format)
    questions, reply, _ = _WITH_WORD[kind]
    return questions[at].format(word), reply.format(word)


def _fixed(rng: Random) -> tuple[str, str]:
    questions, reply = rng.choice(_FIXED)
    return rng.choice(questions), reply


def exchange(rng: Random, split: Split) -> tuple[str, str]:
    """A question and its reply."""
    if split.name == "train" and rng.random() < 0.6:
        return _fixed(rng)
    return _holed(rng, split)


def _remembered(rng: Random, split: Split) -> tuple[list[dict], str]:
    def draw() -> tuple[int, int, str]:
        kind = rng.randrange(len(_REMEMBERED))
        return kind, rng.randrange(len(_REMEMBERED[kind][2])), rng.choice(_REMEMBERED[kind][4])

    kind, at, word = split.draw(draw, "small_talk remembered {0[0]} {0[1]} {0[2]}".format)
    statement, acknowledged, questions, reply, _ = _REMEMBERED[kind]
    messages = [user(statement.format(word)), answer(acknowledged.format(word))]
    for _ in range(rng.choice((0, 0, 1, 2))):
        question, said = _fixed(rng)
        messages += [user(question), answer(said)]
    final = reply.format(word)
    messages += [user(questions[at]), answer(final)]
    return messages, final


def generate(rng: Random, length_budget: int, split: Split) -> Example:
    thinking = rng.random() < 0.25
    if rng.random() < 0.3:
        messages, said = _remembered(rng, split)
        difficulty = "remembered"
    else:
        messages = []
        said = ""
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            question, said = exchange(rng, split)
            messages += [user(question), answer(said)]
        difficulty = "single" if len(messages) == 2 else "several"
    if thinking:
        messages[-1] = answer(said, "The user talks to me. I answer politely.")
    return Example(SKILL, messages, thinking=thinking, expected=said, scorer="trimmed",
                   difficulty=difficulty)

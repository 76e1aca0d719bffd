"""Prose of random words: what cannot be predicted well. A grammar of a few sentence forms with word
lists of its own, written for this program; there is no other text in it."""

from __future__ import annotations

from random import Random

from ..example import Example, answer, user
from ..split import Split
from ..words import CITIES, FIRST_NAMES, KEY_TAILS, WEEKDAYS

SKILL = "free_text"


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_NOUNS = tuple(tail.lower() for tail in KEY_TAILS) + _words("""
actor answer artist aunt baby bank bird boat bottle boy brother cat chair chance child church clock
coat cook corner country crowd dance daughter day doctor dog door dream driver engine evening face
family farm farmer father fire fish floor friend game ghost girl guard guest hand hat horse hospital
hour house idea job judge king kitchen ladder letter library machine man map mayor minute morning
mother neighbour night noise novel office painter paper party past person photo piano pilot place
poem poet promise queen question radio reason restaurant room school sea secret shop sister sky smile
soldier song sound spoon stone storm story stranger street student table tailor teacher thief ticket
train tree uncle voice wall wheel winter witness woman word world year
""")
_ADJECTIVES = _words("""
angry big blind bored broken busy careful cheap cheerful clean cold curious dark dirty distant dry
early empty famous foreign forgotten free friendly full funny generous grey heavy honest hungry
hidden kind large late lazy lonely long loud lucky narrow nervous new noisy old open painted patient
pale poor proud quiet rich round sad serious shy silent simple slow small soft strange strong sudden
tall thin tired ugly warm wet wild wise wooden wrong young
""")
_VERBS = _words("""
admired answered avoided believed borrowed bought broke built called carried caught changed chased
cleaned closed counted covered described discovered drew dropped expected feared followed forgot
found guarded heard helped hid hated invited kept kissed knew left liked lost loved met missed moved
needed noticed opened ordered painted passed paid pulled pushed read recognised remembered repaired
returned saved saw showed sold stole studied taught thanked threw touched trusted understood visited
waited wanted warned washed watched wore wrote
""")
_MOVES = _words("""
arrived climbed cried danced disappeared escaped fell laughed listened paused ran rested returned
sang sat shouted slept smiled stood stopped swam talked trembled turned waited walked wandered whispered
worked
""")
_ADVERBS = _words("""
again alone always barely carefully certainly finally gladly hardly immediately loudly maybe mostly
never often once perhaps politely probably quickly quietly rarely sadly secretly slowly soon
somehow sometimes still suddenly together twice usually
""")
_PLACES = _words("above across against around behind below beneath beside beyond inside near outside "
                 "past through towards under without")
_JOINS = ("and", "but", "because", "while", "until", "although", "so", "when", "before", "after")
_DETERMINERS = ("the", "the", "the", "a", "this", "that", "every", "another", "no", "one", "my",
                "her", "his", "their", "our", "some")
_THINGS = ("What nobody knew was that", "In the end", "On that day", "Of course", "Years later",
           "It was said that", "Then", "At first", "For a moment", "By chance")


class _Prose:
    def __init__(self, rng: Random) -> None:
        self.choice = rng.choice
        self.random = rng.random

    def noun_phrase(self) -> str:
        if self.random() < 0.12:
            return self.choice(FIRST_NAMES)
        words = [self.choice(_DETERMINERS)]
        if self.random() < 0.45:
            words.append(self.choice(_ADJECTIVES))
        words.append(self.choice(_NOUNS))
        if words[0] == "a" and words[1][0] in "aeiou":
            words[0] = "an"
        return " ".join(words)

    def place(self) -> str:
        if self.random() < 0.1:
            return f"in {self.choice(CITIES)}"
        return f"{self.choice(_PLACES)} {self.noun_phrase()}"

    def clause(self) -> str:
        words = [self.noun_phrase()]
        if self.random() < 0.25:
            words.append(self.choice(_ADVERBS))
        if self.random() < 0.6:
            words += [self.choice(_VERBS), self.noun_phrase()]
            if self.random() < 0.3:
                words.append(self.place())
        else:
            words.append(self.choice(_MOVES))
            if self.random() < 0.7:
                words.append(self.place())
        return " ".join(words)

    def sentence(self) -> str:
        start = self.random()
        said = self.clause()
        if start < 0.15:
            said = f"{self.choice(_THINGS)} {said}"
        elif start < 0.25:
            said = f"On {self.choice(WEEKDAYS)} {said}"
        if self.random() < 0.4:
            said += f", {self.choice(_JOINS)} {self.clause()}"
        return said[0].upper() + said[1:] + self.choice("......?!")


def paragraph(rng: Random, sentences: int) -> str:
    prose = _Prose(rng)
    return " ".join(prose.sentence() for _ in range(sentences))


_ASK = ("Tell me a story.", "Write a short story.", "Write some sentences.", "Tell me something.",
        "Make up a story.", "Write a paragraph.", "Invent something.")


def generate(rng: Random, length_budget: int, split: Split) -> Example:
    most = max(2, min(30, length_budget // 16))
    text = split.draw(lambda: paragraph(rng, rng.randint(2, most)), "free_text {}".format)
    if rng.random() < 0.5:
        return Example(SKILL, text=text, difficulty="document")
    return Example(SKILL, [user(rng.choice(_ASK)), answer(text)], difficulty="answer")

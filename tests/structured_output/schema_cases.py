"""Schemas, patterns and grammars for the test of structured outputs.

Every generated schema uses only what docs/structured_output.md lists as supported, so none of them may be
refused. The generator is deterministic: the same seed gives the same cases on every machine.
"""

import random
import string

NAMES = ["name", "city", "age", "tags", "id", "url", "a/b", "quoted \"key\"", "名前", "x", "value", "Unit", "is_ok", "n"]
WORDS = ["red", "green", "http://a/b", "", "two words", "tab\there", "quote\"d", "back\\slash", "日本", "🙂", "null", "0"]
PATTERNS = ["^[a-z]{2,5}$", "^[A-Z][a-z]*$", "^(yes|no)$", "^[0-9]{3}-[0-9]{4}$", "^a+b?$", "^\\d{1,3}(\\.\\d{1,3}){3}$",
            "^[^\"\\\\]{0,8}$", "^(ab|cd)+$"]
FORMATS = ["date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "hostname", "uri"]


class Cases:
    def __init__(self, seed):
        self.random = random.Random(seed)

    def string(self):
        r = self.random
        kind = r.randrange(5)
        if kind == 0:
            return {"type": "string"}
        if kind == 1:
            low = r.randrange(0, 6)
            return {"type": "string", "minLength": low, "maxLength": low + r.randrange(0, 12)}
        if kind == 2:
            return {"type": "string", "maxLength": r.choice([0, 1, 3, 20, 64])}
        if kind == 3:
            return {"type": "string", "pattern": r.choice(PATTERNS)}
        return {"type": "string", "enum": r.sample(WORDS, r.randrange(1, 5))}

    def integer(self):
        r = self.random
        schema = {"type": "integer"}
        low, high = sorted((r.randrange(-200, 200), r.randrange(-200, 200)))
        kind = r.randrange(6)
        if kind == 1:
            schema["minimum"] = low
        elif kind == 2:
            schema["maximum"] = high
        elif kind == 3:
            schema.update(minimum=low, maximum=high)
        elif kind == 4:
            schema.update(exclusiveMinimum=low - 2, exclusiveMaximum=high + 2)
        elif kind == 5:
            schema = {"enum": r.sample(range(-9, 99), 3)}
        return schema

    def constant(self):
        r = self.random
        value = r.choice([None, True, False, 0, -7, 3, "x", "http://a/b", "line\nbreak", [], [1, "a"], {"k": [True]}, {}])
        return {"const": value}

    def array(self, depth):
        r = self.random
        schema = {"type": "array", "items": self.schema(depth - 1)}
        kind = r.randrange(4)
        if kind == 1:
            schema["minItems"] = r.randrange(0, 3)
        if kind in (1, 2):
            schema["maxItems"] = r.randrange(3, 6)
        if kind == 3:
            schema = {"type": "array", "prefixItems": [self.schema(depth - 1) for _ in range(r.randrange(1, 3))],
                      "items": False}
            schema["minItems"] = len(schema["prefixItems"])
        return schema

    def object(self, depth):
        r = self.random
        names = r.sample(NAMES, r.randrange(0, 4))
        schema = {"type": "object", "properties": {name: self.schema(depth - 1) for name in names}}
        schema["required"] = [name for name in names if r.random() < 0.6]
        kind = r.randrange(4)
        if kind == 0:
            schema["additionalProperties"] = False
        elif kind == 1:
            schema["additionalProperties"] = self.schema(0)
        if r.random() < 0.3:
            schema["title"], schema["description"] = "An object", "Text that constrains nothing."
        return schema

    def schema(self, depth):
        r = self.random
        kinds = ["string", "integer", "constant", "boolean", "null", "number", "types"]
        if depth > 0:
            kinds += ["array", "object", "object", "object", "anyOf"]
        kind = r.choice(kinds)
        if kind in ("string", "integer", "constant"):
            return getattr(self, kind)()
        if kind in ("boolean", "null", "number"):
            return {"type": kind}
        if kind == "types":
            return {"type": r.sample(["string", "integer", "boolean", "null"], 2)}
        if kind == "anyOf":
            return {"anyOf": [self.schema(depth - 1) for _ in range(r.randrange(2, 4))]}
        return getattr(self, kind)(depth)


def references():
    """Schemas that refer to themselves or to definitions."""
    yield {"$defs": {"node": {"type": "object", "properties": {"value": {"type": "integer"},
                                                              "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                              "required": ["value", "next"], "additionalProperties": False}}, "$ref": "#/$defs/node"}
    yield {"type": "object", "properties": {"left": {"$ref": "#/definitions/leaf"}, "right": {"$ref": "#/definitions/leaf"}},
           "required": ["left", "right"], "additionalProperties": False,
           "definitions": {"leaf": {"type": "string", "maxLength": 4}}}
    yield {"type": "array", "maxItems": 3, "items": {"$ref": "#/$defs/pair"},
           "$defs": {"pair": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "minItems": 2,
                              "items": False}}}


def generated(count, seed=1):
    """(name, schema) of `count` schemas."""
    cases = Cases(seed)
    result = [(f"ref-{i}", schema) for i, schema in enumerate(references())]
    for i, format_name in enumerate(FORMATS):
        result.append((f"format-{format_name}", {"type": "string", "format": format_name}))
    result += [("any-object", {"type": "object"}), ("empty-object", {"type": "object", "properties": {}}),
               ("closed-object", {"type": "object", "additionalProperties": False}), ("anything", {}), ("true", True)]
    while len(result) < count:
        depth = len(result) % 4
        result.append((f"random-{len(result)}", cases.schema(depth)))
    return result


# Patterns that the whole output must match, in the syntax that Python's re shares.
REGEXES = [
    "[a-z]{3,8}", "(foo|bar)+", "\\d{4}-\\d{2}-\\d{2}", "[A-Z][a-z]+( [A-Z][a-z]+)?", "a?b*c+", "(0|[1-9][0-9]*)",
    "[\\x00-\\x7f]{1,6}", "[^a-z]{2,4}", "[à-ÿ]{2,5}", "[一-龥]{1,3}", "x{0,3}y{2}", "(a(b(c)?)?)?d", "\\w{1,6}@\\w{1,6}\\.com",
    "-?[0-9]{1,3}(\\.[0-9]{1,2})?", "(?:ab){2,3}", "[🙂-🙏]{1,2}", "\\s{1,3}\\S", "[\"\\\\/]{1,3}", "(yes|no|maybe)", ".{1,5}",
]


def _balanced(text):
    depth = 0
    for character in text:
        depth += 1 if character == "(" else -1
        if depth < 0:
            return False
    return depth == 0 and text != ""


def _sum(text):
    parts = text.split("+")
    return all(part.isascii() and part.isdigit() for part in parts)


def _list_of_digits(text):
    if not (text.startswith("[") and text.endswith("]")):
        return False
    inside = text[1:-1]
    return inside == "" or all(len(item) == 1 and item in string.digits for item in inside.split(","))


def _assignment(text):
    name, sign, value = text.partition("=")
    return sign == "=" and name != "" and set(name) <= set("abc") and value in ("true", "false", "none")


def _nested(text):
    """a^n b^n, n >= 1."""
    half = len(text) // 2
    return half > 0 and text == "a" * half + "b" * half


# (rules, independent check of the whole output)
EBNFS = [
    ('root ::= "(" root* ")"', lambda text: _balanced(text) and _balanced_once(text)),
    ('root ::= digits ("+" digits){0,3}\ndigits ::= [0-9]{1,4}', _sum),
    ('root ::= "[" (digit ("," digit)*)? "]"\ndigit ::= [0-9]', _list_of_digits),
    ('root ::= name "=" value\nname ::= [a-c]+\nvalue ::= "true" | "false" | "none"', _assignment),
    ('root ::= "ab" | "a" root "b"', _nested),
    ('root ::= [^\\x00-\\x1f"]{1,6}', lambda text: 1 <= len(text) <= 6 and all(ord(c) > 0x1f and c != '"' for c in text)),
    ('root ::= "日本" ("語" | "")', lambda text: text in ("日本語", "日本")),
]


def _balanced_once(text):
    depth = 0
    for i, character in enumerate(text):
        depth += 1 if character == "(" else -1
        if depth == 0 and i + 1 < len(text):
            return False
    return True


CHOICES = [["yes", "no"], ["a", "ab", "abc"], ["\"quoted\"", "back\\slash", "new\nline", "日本語"], ["one"]]

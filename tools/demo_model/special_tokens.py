"""The published names of special tokens, in the order of their published ids, without the numbered
place holders. The first three have the ids 0, 1 and 2; the others follow the merges."""

from __future__ import annotations

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
SYSTEM = "<｜System｜>"  # also the drafter's noise token
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"
IMAGE = "<｜deepseek_image｜>"

FIRST = (BOS, EOS, PAD)


def _bars(text: str) -> tuple[str, ...]:
    return tuple(f"<｜{name}｜>" for name in text.split())


# (name, whether the published file flags it as special)
LAST: tuple[tuple[str, bool], ...] = tuple(
    [(SYSTEM, True)]
    + [(name, False) for name in (
        *_bars("fim▁hole fim▁begin fim▁end User Assistant"),
        "<|EOT|>",
        *_bars("tool▁calls▁begin tool▁calls▁end tool▁call▁begin tool▁call▁end tool▁outputs▁begin "
               "tool▁outputs▁end tool▁output▁begin tool▁output▁end tool▁sep begin▁of▁repo▁name "
               "end▁of▁repo▁name begin▁of▁file▁name end▁of▁file▁name begin▁of▁file end▁of▁file"),
        THINK,
        END_THINK,
        *_bars("place▁holder▁for▁copy place▁holder▁for▁pointer▁replace"),
        DSML,
        *_bars("begin▁sys end▁sys latest_reminder action query authority domain task political "
               "entity title safety answer search"),
        "<dsml:",
        "</dsml:",
        *_bars("search▁begin search▁end"),
    )]
    + [(name, True) for name in _bars("extracted_url read_url end_of_query rl_image_pad "
                                      "rl_image_start")]
    + [(IMAGE, False)]
    + [(name, True) for name in _bars("/polygon polygon /point point /box box /ref ref")]
)

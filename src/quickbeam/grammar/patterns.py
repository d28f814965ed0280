"""Rewrites regular expressions without look-around, which llguidance doesn't have.

llguidance can ask a text to match several expressions. So a condition on how a text begins or ends
becomes an expression of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

LOOK = r"\(\?<?[=!]"
COUNT = r"(?:[*+?]|\{\d+(?:,\d*)?\})\??"
# what may stand in a look-around that is read here: characters and sets, and groups of these
ATOM = r"(?:\\[^bBk1-9]|\[(?:\\.|[^\]\\])*\]|[^\\()\[])"
GROUP = rf"\((?!\?<?[=!]){ATOM}*\)"
# A set that is not closed goes on to the end, so that reading takes time in proportion to the text.
PART = re.compile(
    rf"""
      (?P<left_out> {LOOK} (?:{ATOM}|{GROUP})* \) (?:{COUNT})? | \\[bB] (?:{COUNT})? )
    | (?P<unknown> {LOOK} | \\[k1-9] )
    | \\.
    | \[ (?: \\. | [^\]\\] )* \]?
    | .
    """,
    re.VERBOSE | re.DOTALL,
)
SUSPICIOUS = re.compile(rf"{LOOK}|\\[bBk1-9]")
MOST_CHARACTERS = 10_000  # of an expression that is rewritten

# a character, or a set
SET = r"(?P<set>\[(?!\^?\])(?:\\.|[^\]\\])+\]|\\[dDwWsS\W]|[^\\\[\](){}.*+?|^$])"
# look-around, and the expression that means the same: `other` is any character but those of `set`
AT_BEGINNING = {
    r"\(\?=(?P<inner>.*)\)": r"^(?:{inner})",
    rf"\(\?!{SET}\)": r"^(?:$|{other})",
    rf"\(\?!\^?{SET}\*\$\)": r"{other}",
    rf"\(\?!\^?{SET}\+\$\)": r"^$|{other}",
    rf"\(\?!\.\*{SET}(?P=set)\)": r"^(?:{set}?{other})*{set}?$",
}
AT_END = {
    r"\(\?<=(?P<inner>.*)\)": r"(?:{inner})$",
    rf"\(\?<!{SET}\)": r"(?:^|{other})$",
}
# The last part of an expression, in which pydantic counts a `Decimal`'s digits. Its first branch
# matches the empty text, so that every text matches it.
MATCHES_ALL = re.compile(r"(?<!\\)\(\?:\\d\{0,\d+\}\|\(\?=[^()]*\)[^()]*\)\Z")


class Rewritten(NamedTuple):
    """Expressions that a text must match, all of them.

    `exact`: whether they mean the same as the original expression. Otherwise the original asks for
    more.
    """

    patterns: Sequence[str]
    exact: bool


NOTHING = Rewritten([""], exact=False)  # every text matches the empty expression


def without_look_around(pattern: str) -> Rewritten:
    """Return expressions without look-around for one that a text must contain a match of.

    Look-around as in `AT_BEGINNING` and `AT_END` is rewritten. All other look-around is left out,
    and so are boundaries of words. All of an expression is left out if it is too long, or has
    references to groups or look-around inside of look-around.
    """
    if not SUSPICIOUS.search(pattern):
        return Rewritten([pattern], True)
    if len(pattern) > MOST_CHARACTERS:
        return NOTHING
    parts = list(PART.finditer(MATCHES_ALL.sub("", pattern)))
    if any(part["unknown"] for part in parts):
        return NOTHING
    remaining = "".join(part[0] for part in parts if not part["left_out"])
    left_out = [i for i, part in enumerate(parts) if part["left_out"]]
    has_branches = any(part[0] == "|" for part in parts)
    conditions = list[str | None]()
    for number, i in enumerate(left_out):
        rules: dict[str, str] = {}
        if i == number + 1 and parts[0][0] == "^":
            rules = AT_BEGINNING
        elif i == len(parts) - 2 and parts[-1][0] == "$":
            rules = AT_END
        conditions.append(None if has_branches else _condition(parts[i][0], rules))
    rewritten = [condition for condition in conditions if condition is not None]
    return Rewritten([remaining, *rewritten], exact=len(rewritten) == len(conditions))


def _condition(look_around: str, rules: dict[str, str]) -> str | None:
    """Return the expression that means the same as a look-around; None if no rule is for it."""
    for rule, expression in rules.items():
        match = re.fullmatch(rule, look_around, re.DOTALL)
        if match is not None:
            groups = match.groupdict()
            return expression.format(**groups, other=_complement(groups.get("set", "")))
    return None


def _complement(characters: str) -> str:
    """Return the set of all characters but those of a character or set."""
    if characters.startswith("[^"):
        return f"[{characters[2:]}"
    if characters.startswith("["):
        return f"[^{characters[1:]}"
    return f"[^{characters}]"

"""Regular expressions without look-around that mean the same as ones with it, where there are any.

llguidance has no look-around, and it can ask a string to match several expressions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

ATOM = re.compile(
    r"""
      \[ \^? \]? (?: \\. | [^\]\\] )* \]
    | \{ \d+ (?: ,\d* )? \}\??
    | [*+?]\??
    | \( (?: \? (?: P?<\w+> | <?[=!] | [a-zA-Z-]* [:)] ) )?
    | \\ (?: [pPk][{<][^}>]*[}>] | x[0-9a-fA-F]{2} | u[0-9a-fA-F]{4} | . )
    | .
    """,
    re.VERBOSE | re.DOTALL,
)
# a look-ahead for so many digits and a point, before zeros, and the number that must have them: as
# pydantic writes it for a `Decimal`
DECIMAL = re.compile(
    r"""
      \(\?=\[\\d\.\]\{1,(?P<most>\d{1,2})\}0\*\$\)
      \\d (?: \* | \{0,(?P<whole>\d{1,2})\} )
      \\\. \\d (?: \* | \{0,(?P<places>\d{1,2})\} ) 0\*
    """,
    re.VERBOSE,
)
LOOKS = ("(?=", "(?!", "(?<=", "(?<!")
BOUNDARIES = (r"\b", r"\B")
ANY = (".*", r"[\s\S]*", r"[^]*")
SETS = "dDwWsS"  # escapes that are sets
MOST_LOOKS = 16  # how many conditions are rewritten at either end of an expression
MOST_TEXTS = 100  # how many texts are few
MOST_ATOMS = 200  # how long one may be that excludes something


class Rewritten(NamedTuple):
    """Expressions that a text must match, all of them.

    `exact`: whether they mean what was rewritten. Otherwise it asked for more.
    """

    patterns: Sequence[str]
    exact: bool


def without_look_around(pattern: str) -> Rewritten | None:
    """Return expressions without look-around for one that a text must contain a match of.

    A look-ahead at the beginning (`^(?=…)`, `^(?!…)`) and a look-behind at the end (`(?<=…)$`,
    `(?<!…)$`) become expressions of their own where that is known how. All others are left out, and
    the boundaries of words. None for an expression with references to its groups.
    """
    pattern = DECIMAL.sub(_decimal, pattern)
    atoms = ATOM.findall(pattern)
    if any(re.fullmatch(r"\\[1-9k].*", atom, re.DOTALL) for atom in atoms):
        return None
    if not any(atom in LOOKS or atom in BOUNDARIES for atom in atoms):
        return Rewritten([pattern], True)
    own, exact = list[str](), True
    if len(_branches(atoms)) == 1:
        for _ in range(MOST_LOOKS):
            if atoms[:1] != ["^"] or atoms[1:2] not in (["(?="], ["(?!"]):
                break
            end = _group_end(atoms, 1)
            if end is None or _is_count(_text(atoms[end : end + 1])):
                break
            inner, negative = atoms[2 : end - 1], atoms[1] == "(?!"
            atoms = ["^", *atoms[end:]]
            found = _not_ahead(inner) if negative else _ahead(inner)
            own += found.patterns
            exact = exact and found.exact
        for _ in range(MOST_LOOKS):
            start = _look_behind(atoms)
            if start is None:
                break
            inner, negative = atoms[start + 1 : -2], atoms[start] == "(?<!"
            atoms = [*atoms[:start], "$"]
            found = _not_behind(inner) if negative else Rewritten([_text([*inner, "$"])], True)
            own += found.patterns
            exact = exact and found.exact
    rest = _plain(atoms)
    return Rewritten([_text(rest), *own], exact and rest == atoms)


def few_texts(pattern: str) -> list[str] | None:
    """Return the texts that contain a match of an expression; None if they are many or unknown."""
    texts = set[str]()
    for branch in _branches(ATOM.findall(pattern)):
        inner = _few_texts(branch[1:-1]) if branch[:1] == ["^"] and branch[-1:] == ["$"] else None
        if inner is None or len(texts | inner) > MOST_TEXTS:
            return None
        texts |= inner
    return sorted(texts)


def _few_texts(atoms: Sequence[str]) -> set[str] | None:
    """Return the texts that atoms match as a whole; None if they are many or unknown."""
    branches = _branches(atoms)
    if len(branches) > 1:
        every = [_few_texts(branch) for branch in branches[: MOST_TEXTS + 1]]
        known = [texts for texts in every if texts is not None]
        return set[str]().union(*known) if len(known) == len(branches) else None
    texts, i = {""}, 0
    while i < len(atoms):
        end = _group_end(atoms, i) if atoms[i] in ("(", "(?:") else i + 1
        if end is None:
            return None
        inner = _few_texts(atoms[i + 1 : end - 1]) if end > i + 1 else _few_characters(atoms[i])
        if inner is not None and atoms[end : end + 1] == ["?"]:
            inner, end = inner | {""}, end + 1
        if inner is None or len(texts) * len(inner) > MOST_TEXTS:
            return None
        texts = {text + more for text in texts for more in inner}
        i = end
    return texts


def _few_characters(atom: str) -> set[str] | None:
    """Return the characters that an atom matches; None if they are many or unknown."""
    if _is_character(atom):
        return {atom[-1]}
    if not re.fullmatch(r"\[[\w-]*\]", atom, re.ASCII):
        return None
    characters = set[str]()
    for one in re.finditer(r"(.)-(.)|(.)", atom[1:-1]):
        first, last = one[1] or one[3], one[2] or one[3]
        characters.update(map(chr, range(ord(first), ord(last) + 1)))
    return characters


# --- conditions on the beginning and on the end ---


def _ahead(inner: Sequence[str]) -> Rewritten:
    """Rewrite `^(?=inner)`."""
    plain = _plain(inner)
    return Rewritten([f"^(?:{_text(plain)})"], plain == inner)


def _not_ahead(inner: Sequence[str]) -> Rewritten:
    """Rewrite `^(?!inner)`: a condition for each of its branches."""
    own, exact = list[str](), True
    for branch in _expanded(inner):
        pattern = _branch_not_ahead(branch)
        own += [] if pattern is None else [pattern]
        exact = exact and pattern is not None
    return Rewritten(own, exact)


def _branch_not_ahead(atoms: Sequence[str]) -> str | None:
    atoms = list(atoms[1:] if atoms[:1] == ["^"] else atoms)
    whole = atoms[-1:] == ["$"]
    atoms = atoms[: len(atoms) - whole]
    if len(atoms) == 2 and atoms[1] in ("*", "+") and whole:  # not of these characters alone
        other = _negated(atoms[0])
        return other and (other if atoms[1] == "*" else f"^$|{other}")
    if _text(atoms[:2]) in ANY:
        return _not_at_end(atoms[2:]) if whole else _not_within(atoms[2:])
    negated = [_negated(atom) for atom in atoms]
    if None in negated:
        return None
    result = r"[\s\S]" if whole else ""
    if not whole and not atoms:
        return None  # it never matches
    for i in range(len(atoms) - 1, -1, -1):
        more = f"|{atoms[i]}{result}" if result else ""
        result = f"(?:$|{negated[i]}{more})"
    return f"^{result}"


def _not_within(atoms: Sequence[str]) -> str | None:
    """Return what a text matches in which these characters don't follow each other."""
    negated = [_negated(atom) for atom in atoms]
    if None in negated or not atoms:
        return None
    first = atoms[0]
    if all(atom == first for atom in atoms):
        most = len(atoms) - 1
        runs = f"{first}{{0,{most}}}" if most else ""
        return f"^(?:{runs}{negated[0]})*{runs}$"
    if len(atoms) == 2 and all(map(_is_character, atoms)):
        return f"^(?:[^{first}]|{first}+[^{first}{atoms[1]}])*{first}*$"
    return None


def _not_behind(inner: Sequence[str]) -> Rewritten:
    """Rewrite `(?<!inner)$`."""
    own, exact = list[str](), True
    for branch in _expanded(inner):
        pattern = _not_at_end(branch)
        own += [] if pattern is None else [pattern]
        exact = exact and pattern is not None
    return Rewritten(own, exact)


def _not_at_end(atoms: Sequence[str]) -> str | None:
    """Return what a text matches that doesn't end with these characters."""
    negated = [_negated(atom) for atom in atoms]
    if None in negated or not atoms:
        return None
    endings = (f"{negated[i]}{_text(atoms[i + 1 :])}" for i in range(len(atoms)))
    shorter = (f"^{_text(atoms[i:])}" for i in range(1, len(atoms) + 1))
    return f"(?:{'|'.join([*endings, *shorter])})$"


def _decimal(found: re.Match[str]) -> str:
    """Return an expression for a number whose digits before and after the point are counted."""
    most = int(found["most"]) - 1
    whole, places = int(found["whole"] or most), int(found["places"] or most)
    counts = [(before, min(places, most - before)) for before in range(min(whole, most) + 1)]
    numbers = [rf"\d{{0,{before}}}\.\d{{0,{after}}}0*" for before, after in counts]
    return f"(?:{'|'.join(numbers)})"


# --- parts of expressions ---


def _text(atoms: Sequence[str]) -> str:
    return "".join(atoms)


def _is_count(atom: str) -> bool:
    return atom[:1] in ("*", "+", "?", "{") and atom != "{"


def _is_character(atom: str) -> bool:
    """Whether an atom is one character: itself, or escaped."""
    if len(atom) == 1:
        return atom not in "^$.*+?()|[]{}"
    return len(atom) == 2 and atom[0] == "\\" and not atom[1].isalnum()


def _negated(atom: str) -> str | None:
    """Return the set of the characters that an atom doesn't match; None if it is no set."""
    if atom.startswith("[^"):
        return f"[{atom[2:]}" if atom != "[^]" else None
    if atom.startswith("[") and atom.endswith("]"):
        return f"[^{atom[1:]}"
    is_set = len(atom) == 2 and atom[0] == "\\" and (atom[1] in SETS or not atom[1].isalnum())
    return f"[^{atom}]" if is_set or _is_character(atom) else None


def _group_end(atoms: Sequence[str], start: int) -> int | None:
    """Return the index behind the group that begins at `start`; None if it isn't closed."""
    depth = 0
    for i in range(start, len(atoms)):
        depth += (atoms[i].startswith("(") and not atoms[i].endswith(")")) - (atoms[i] == ")")
        if depth == 0:
            return i + 1
    return None


def _look_behind(atoms: Sequence[str]) -> int | None:
    """Return where the look-behind before the final `$` begins; None if there is none."""
    if atoms[-1:] != ["$"]:
        return None
    starts = (i for i, atom in enumerate(atoms) if atom in ("(?<=", "(?<!"))
    return next((i for i in starts if _group_end(atoms, i) == len(atoms) - 1), None)


def _branches(atoms: Sequence[str]) -> list[list[str]]:
    """Return the branches of an expression."""
    branches, depth = [list[str]()], 0
    for atom in atoms:
        depth += (atom.startswith("(") and not atom.endswith(")")) - (atom == ")")
        if atom == "|" and depth == 0:
            branches.append([])
        else:
            branches[-1].append(atom)
    return branches


def _expanded(atoms: Sequence[str]) -> list[list[str]]:
    """Return the branches of an expression, those of a group at its end or before `$` as well.

    Those of one that is too long can't be rewritten.
    """
    if len(atoms) > MOST_ATOMS:
        return [["("]]
    expanded = list[list[str]]()
    for branch in _branches(atoms):
        start = next((i for i, atom in enumerate(branch) if atom in ("(", "(?:")), None)
        end = None if start is None else _group_end(branch, start)
        if start is None or end is None or branch[end:] not in ([], ["$"]):
            expanded.append(branch)
            continue
        for inner in _expanded(branch[start + 1 : end - 1]):
            expanded.append([*branch[:start], *inner, *branch[end:]])
    return expanded


def _plain(atoms: Sequence[str]) -> Sequence[str]:
    """Return an expression without the look-around and the boundaries of words in it."""
    plain, i = list[str](), 0
    while i < len(atoms):
        end = i + 1
        if atoms[i] in LOOKS:
            end = _group_end(atoms, i) or len(atoms)
        elif atoms[i] not in BOUNDARIES:
            plain.append(atoms[i])
            i += 1
            continue
        i = end + 1 if end < len(atoms) and _is_count(atoms[end]) else end
    return plain

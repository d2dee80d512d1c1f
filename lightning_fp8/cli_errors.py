"""Mistakes on the command line, told in one line."""

from __future__ import annotations

import argparse
import itertools
import re
from typing import NamedTuple, NoReturn

from lightning.pytorch.cli import LightningArgumentParser


class OneLineParser(LightningArgumentParser):
    """A parser that tells a mistake in one line, where jsonargparse prints the usage and a tree of attempts."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Write what is wrong to stderr and exit with code 2."""
        if not self.exit_on_error:
            super().error(message, ex)
        self.exit(2, f"lightning-fp8: error: {one_line(message)}\n")


class CommandParser(argparse.ArgumentParser):
    """The same for the commands that are none of Lightning's, where argparse prints the usage first."""

    def error(self, message: str) -> NoReturn:
        """Write what is wrong to stderr and exit with code 2."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def one_line(message: str) -> str:
    """The essence of jsonargparse's message: the dotted key, why its value is wrong, and the value.

    jsonargparse (seen with 4.53) indents by depth: ``Parser key "model":``, then one item, behind a dash, for each type
    that the value might have had, in which the key of an argument inside the class may come again.

    Args:
        message: what the parser gives to ``error``, of any length.

    Returns:
        One line without its end.
    """
    lines = [_Line(len(text) - len(text.lstrip(" -")), text.strip(" -")) for text in message.splitlines()]
    lines = [line for line in lines if line.text and not line.text.startswith(_STRUCTURE)]
    keys: list[str] = []
    while keyed := [line for line in lines if _KEY.match(line.text)]:
        match = _KEY.match(keyed[0].text)
        keys.append(match[1] if match else "")
        rest = _Line(keyed[0].depth, keyed[0].text[match.end() if match else 0 :].strip())
        lines = [rest] * bool(rest.text) + _below(lines, keyed[0])
    where = ".".join(keys) + ": " if keys else ""
    for line in lines:
        if line.text.startswith("Problem with given class_path"):  # The one type that the value was meant for.
            where += line.text.split("'")[1] + ": "
            lines = _below(lines, line)
            break
    return where + _reasons([line.text for line in lines])


class _Line(NamedTuple):
    depth: int
    text: str


_KEY = re.compile(r'Parser key "([^"]+)":')
_STRUCTURE = (
    "Does not validate against",
    "Subtypes:",
    "Errors:",
    "Given value type:",
    "Expected a <class 'NoneType'>",
    "Expected <class 'NoneType'>",
    "Expected a path but",  # Other readings of a class path that jsonargparse tried.
    "Subclass types expect one of:",  # And the forms in which a class may be given.
    "a class path (str)",
    "a dict with class_path entry",
    "a dict without class_path but",
    "a dict with parameters accepted by",
)


def _below(lines: list[_Line], parent: _Line) -> list[_Line]:
    """The lines under ``parent`` in the tree that the indentation makes."""
    following = lines[lines.index(parent) + 1 :]
    return list(itertools.takewhile(lambda line: line.depth > parent.depth, following))


def _reasons(texts: list[str]) -> str:
    """Each reason once, the unfitting types as one list, and a short value at the end."""
    expected: dict[str, None] = {}
    reasons: dict[str, None] = {}
    value = short_name = ""
    for text in texts:
        if match := re.fullmatch(r"Expected a dot import path(?: string: (\w+))?.*", text):
            short_name = match[1] or short_name  # What else it says is another reading of a class path.
        elif text.startswith("Given value: "):
            nested = re.fullmatch(r"NestedArg\(key='(.+)', val='?(.*?)'?\)", text[len("Given value: ") :])
            value = f"{nested[1]}={nested[2]}" if nested else text[len("Given value: ") :]
        elif match := re.fullmatch(r"(?:Expected|Not a valid subclass of) (?:a )?(.+?)(?:\. Got value: (.*))?", text):
            value = match[2] or value
            expected[_type_name(match[1])] = None
        else:
            reasons[text.removesuffix(":")] = None
    # A union offers the class to each of its types: that it is none of the others matters where nothing else is wrong.
    own = [reason for reason in reasons if not reason.startswith("Import path")]
    if reasons and not own:
        # A class inside the right one, by a name that jsonargparse looks for only where its settings fit.
        hint = f"{short_name} does not fit, or its settings do not: its full path (package.{short_name}) tells which"
        own = [hint] if short_name else list(reasons)
    problem = "; ".join(own) or f"expected {' or '.join(expected) or 'the name of an importable class'}"
    short = value and not value.startswith(("[", "{", "Namespace"))
    return problem + (f", got {value}" if short else "")


def _type_name(text: str) -> str:
    if match := re.fullmatch(r"<class '(?:.*\.)?(.+)'>|typing\.Literal\[(.+)\]", text):
        return match[1] or match[2]
    return text.replace("typing.", "")

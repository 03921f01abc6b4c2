"""Reads bench/NOTES.md: what was predicted of each change, what came out, and the figures in between.

An entry is a heading `## <title> (<date>)`, with ": lost" before or behind the date if the change was taken back, and paragraphs that begin with a word of FIELDS; lines that continue a paragraph are
indented. A heading whose text has no such word (a profile) has one field, "". "a -> b" are TFLOP/s before and after, of one run.
"""

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

from fa3_course import paths

FIELDS = ("Prediction", "Version", "Outcome", "Why", "Trap", "Known", "Next")
HEADING = re.compile(r"^## (?P<title>.+) \((?P<date>\d{4}-\d\d-\d\d)\)(?P<rest>.*)$")
ARROW = re.compile(r"(?P<before>\d+) -> (?P<after>\d+)")
# the words of a shape: a new one replaces the one of its kind, the others stay until the sentence ends
SHAPE = (
    re.compile(r"\bd(?:64|96|128|192|256)\b"),
    re.compile(r"\b(?:512|\d+k)\b"),
    re.compile(r"\bfull\b|\bcausal\b"),
)


@dataclass(frozen=True)
class Change:
    """TFLOP/s on one shape before and after a change; the shape in the note's words ("d64 16k full")."""

    shape: str
    before: int
    after: int

    @property
    def ratio(self) -> float:
        return self.after / self.before


@dataclass(frozen=True)
class Entry:
    """One heading of the notes.

    Attributes:
        title: without its verdict. lost: whether the heading says that the change was taken back.
        date: ISO 8601. fields: paragraph by its first word, line breaks removed.
    """

    title: str
    lost: bool
    date: str
    fields: dict[str, str]

    @property
    def changes(self) -> list[Change]:
        """Every "a -> b" of the outcome, in the order of the text."""
        return changes(self.fields.get("Outcome", ""))

    def quote(self, *names: str) -> str:
        """Some fields (all when none is named) as a Markdown quotation, word for word."""
        chosen = [name for name in names or self.fields if name in self.fields]
        return "\n>\n".join(f"> **{name or 'Notes'}** {self.fields[name]}" for name in chosen)


def changes(text: str) -> list[Change]:
    """The figures "a -> b" of a text, each with the shape that the words before it name."""
    found = []
    for sentence in re.split(r"\.\s", text):
        shape, at = ["", "", ""], 0
        for arrow in ARROW.finditer(sentence):
            for kind, pattern in enumerate(SHAPE):
                if words := pattern.findall(sentence, at, arrow.start()):
                    shape[kind] = words[-1]
            at = arrow.end()
            found.append(Change(" ".join(filter(None, shape)), int(arrow["before"]), int(arrow["after"])))
    return found


def read(path: Path | None = None) -> list[Entry]:
    """All entries in the order of the file, bench/NOTES.md by default.

    Raises:
        ValueError: a line outside the known form, by its number.
    """
    path = path or paths.checkout() / "bench" / "NOTES.md"
    entries: list[Entry] = []
    field = ""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if heading := HEADING.match(line):
            title = heading["title"].removesuffix(": lost")
            lost = title != heading["title"] or heading["rest"] == ": lost"
            entries.append(Entry(title, lost, heading["date"], {}))
            field = ""
        elif line.startswith("## "):
            raise ValueError(f"{path}:{number}: a heading is `## <what was changed> (<date>)`, this is {line!r}")
        elif entries and line.strip():
            fields = entries[-1].fields
            first = line.split(" ", 1)[0]
            if first in FIELDS:
                field = first
                if field in fields:
                    raise ValueError(f"{path}:{number}: a second {field!r} in {entries[-1].title!r}")
                fields[field] = line.removeprefix(first).strip()
            else:
                fields[field] = f"{fields.get(field, '')} {line.strip()}".strip()
    return entries


def find(text: str, entries: list[Entry] | None = None) -> Entry:
    """The one entry whose title holds `text`, whatever its case.

    Raises:
        KeyError: no entry or several; the message lists the titles.
    """
    entries = read() if entries is None else entries
    found = [entry for entry in entries if text.lower() in entry.title.lower()]
    if len(found) != 1:
        raise KeyError(f"{len(found)} notes hold {text!r}; titles are: {'; '.join(e.title for e in entries)}")
    return found[0]


def profiles(entry: Entry) -> dict[str, dict[str, float]]:
    """The shares of units in a profile entry, by kernel: {"d64 192x128": {"tensor": 0.58, "XU": 0.61, ...}}.

    Only numbers that stand behind a unit's name count ("tensor pipe active 58 %", "XU 61 %").
    """
    text = entry.fields.get("", "")
    starts = [m.start() for m in re.finditer(r"\bd\d+ \d+x\d+: ", text)] + [len(text)]
    unit = re.compile(r"\b(tensor|XU|ALU|FMA|issue)(?: pipe)?(?: active)? (\d+) %")
    found = {}
    for start, end in itertools.pairwise(starts):
        name, _, rest = text[start:end].partition(": ")
        shares: dict[str, float] = {}
        for what, percent in unit.findall(rest):
            shares.setdefault(what, int(percent) / 100)  # the first: a later one belongs to a variant
        found[name] = shares
    return found

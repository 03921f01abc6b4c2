"""bench/NOTES.md as the lesson reads it."""

import pytest

from fa3_course import notes

TEXT = """# Notes
Anything before the first entry is left alone: 1 -> 2.

    ## <an example> (<date>)

## One thing (2026-01-02): lost
Prediction   a lot, since
             reasons
Outcome      d64 16k full 100 -> 120, 1k 50 -> 40; d128 causal 7 -> 8. Other: d256 300 -> 330
## Another: lost (2026-01-03)
Outcome      nothing moved
## Profile (2026-01-04)
d64 192x128: tensor pipe active 58 %, XU 61 %. A consumer waits 5 % of it.
d128 128x128: tensor active 73 %, XU 38 %, issue 39 %; 128x176: 78 %, XU 40 %
"""


@pytest.fixture
def entries(tmp_path):
    (tmp_path / "NOTES.md").write_text(TEXT, encoding="utf-8")
    return notes.read(tmp_path / "NOTES.md")


def test_entries_and_fields(entries):
    assert [(e.title, e.lost) for e in entries] == [("One thing", True), ("Another", True), ("Profile", False)]
    assert entries[0].fields["Prediction"] == "a lot, since reasons"
    assert entries[0].quote("Why", "Prediction") == "> **Prediction** a lot, since reasons"


def test_a_shape_carries_on_until_the_sentence_ends(entries):
    found = [(c.shape, c.before, c.after) for c in entries[0].changes]
    assert found == [
        ("d64 16k full", 100, 120), ("d64 1k full", 50, 40), ("d128 1k causal", 7, 8), ("d256", 300, 330),
    ]  # fmt: skip
    assert found[0][2] / found[0][1] == entries[0].changes[0].ratio


def test_profiles_take_the_first_number_of_each_unit(entries):
    assert notes.profiles(notes.find("profile", entries)) == {
        "d64 192x128": {"tensor": 0.58, "XU": 0.61},
        "d128 128x128": {"tensor": 0.73, "XU": 0.38, "issue": 0.39},
    }


@pytest.mark.parametrize("text", ["no such entry", "o"])
def test_find_wants_exactly_one(entries, text):
    with pytest.raises(KeyError, match="One thing"):
        notes.find(text, entries)


def test_what_is_not_an_entry_is_named_by_its_line(tmp_path):
    path = tmp_path / "NOTES.md"
    for bad, why in (("## No date\n", ":1: a heading"), ("## A (2026-01-01)\nWhy a\nWhy b\n", ":3: a second 'Why'")):
        path.write_text(bad, encoding="utf-8")
        with pytest.raises(ValueError, match=why):
            notes.read(path)


def test_the_repository_s_own_notes_are_read():
    """Every "a -> b" of the file lands in a change of some entry (those in a Trap or Why are read apart)."""
    entries = notes.read()
    assert len(entries) >= 10 and any(entry.lost for entry in entries)
    for entry in entries:
        assert len(entry.changes) == len(notes.ARROW.findall(entry.fields.get("Outcome", "")))
        assert all(entry.fields.values()), entry.title
    assert notes.profiles(notes.find("profile", entries))

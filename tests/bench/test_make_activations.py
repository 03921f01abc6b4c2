from bench.make_activations import ROOT, TEXTS, markdown_cells, prose, source_text


def test_prose_keeps_sentences_and_drops_code_tables_and_markup():
    text = """# A *title*

Two words of **weight** and `code`, see [the map](map.md).

| a | table |
|---|---|

```python
x = 1
```

* one point
1. another
$$ y = x $$
<!-- hidden -->"""
    assert prose(text) == "A title Two words of weight and code, see the map. one point another"


def test_markdown_cells_of_a_percent_script():
    script = "# ---\n# jupyter\n# ---\n\n# %% [markdown]\n# # Head\n# text\n\n# %%\nx = 1  # not this\n\n# %% [markdown]\n# more\n"
    assert prose(markdown_cells(script)) == "Head text more"


def test_the_text_of_today_is_long_enough():
    name, text = source_text(None)
    assert name in TEXTS and (ROOT / name).is_file()
    assert len(text.split()) > 288

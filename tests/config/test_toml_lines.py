"""Lines of keys in TOML text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from titanlike.config.dump import write_tables
from titanlike.config.layers import leaves
from titanlike.config.toml_lines import KeyLines
from titanlike.config.tomllib_compat import loads

TEXT = '''# comment with [a.b] and x = 1
top = 1
[training]
steps = 10 # = [
"quoted key" = 'x'
a.b.c = """
[not.a.table]
x = 1
"""
list = [
  1, # one
  "two ] , }",
  [3],
]
[[optimizer.param_groups]]
pattern = "a"
[[optimizer.param_groups]]
pattern = "b"
[optimizer.param_groups.more]
x = {y = 1, z = [2]}
'''


def test_lines():
    lines = KeyLines(TEXT).lines
    assert lines[("top",)] == 2
    assert lines[("training",)] == 3
    assert lines[("training", "steps")] == 4
    assert lines[("training", "quoted key")] == 5
    assert lines[("training", "a", "b", "c")] == 6
    assert lines[("training", "list", 1)] == 12
    assert lines[("training", "list", 2, 0)] == 13
    assert lines[("optimizer", "param_groups", 0, "pattern")] == 16
    assert lines[("optimizer", "param_groups", 1, "pattern")] == 18
    assert lines[("optimizer", "param_groups", 1, "more", "x", "y")] == 20
    assert lines[("optimizer", "param_groups", 1, "more", "x", "z", 0)] == 20
    assert ("not", "a", "table") not in lines


def test_the_last_statement_of_a_broken_text():
    assert KeyLines('a = 1\n\nb = """x\ny\n').last_line == 3


@settings(deadline=None, max_examples=40)
@given(st.text(max_size=80))
def test_no_text_is_too_broken(text):
    KeyLines(text)


_scalars = st.one_of(
    st.integers(-(10**9), 10**9), st.booleans(), st.text(max_size=10), st.floats(allow_nan=False, allow_infinity=False)
)
_tables = st.dictionaries(
    st.text(min_size=1, max_size=8),
    st.recursive(
        _scalars | st.lists(_scalars, max_size=3),
        lambda inner: st.dictionaries(st.text(min_size=1, max_size=8), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)


@settings(deadline=None, max_examples=40)
@given(_tables)
def test_what_is_written_reads_back_and_every_key_has_a_line(table):
    text = write_tables(table)
    read = loads(text)
    assert read == table
    lines = KeyLines(text).lines
    assert all(path in lines for path, _ in leaves(read))

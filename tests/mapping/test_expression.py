"""The expression language: what it computes, and that a stranger's expression can do no harm."""

import contextlib
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gguf2st.mapping.expression import BUILTINS, Expression, ExpressionError, Template

NAMES = {
    "blocks": 4,
    "sizes": [8, 2, 5],
    "tied": False,
    "name": "qwen35",
    "nothing": None,
    "kv": lambda key, default=None: {"width": 64}.get(key, default),
}

# Plain Python, in which the language's own evaluation must agree with Python's.
PYTHON = (
    """
7
-7 // 2
7 / 2
7 % 4 - 1 + 2 * 3
1.5e3
'a' + "b"
'ab' * 2
[1, 2] + [3]
2 * [0, 1]
[blocks, None, True, 'x']
blocks < 5 <= 5 != 6
1 < blocks < 3
not tied and blocks
tied or 'else'
0 or 0.0 or ''
'yes' if blocks == 4 else missing
missing if tied else 'no'
nothing is None
nothing is not None
2 in sizes
3 not in sizes
'wen' in name
sizes[0]
sizes[-1]
sizes[:2]
sizes[1:]
sizes[::-1]
name[-2:]
[i * i for i in range(5)]
[i for i in range(10) if i % 2 if i > 3]
[blocks for blocks in sizes] + [blocks]
len(sizes) + len(name)
range(2, 9, 3)
min(3, 1, 2) + max(sizes)
sum(sizes)
any([i > 7 for i in sizes])
all([i > 7 for i in sizes])
int(3.9) + int('12')
str(12) + str(True)
round(2.6)
kv('width') // blocks
kv('depth', 12)
(1,
 2)[0]
""".strip()
    .replace(",\n", ",")
    .splitlines()
)


@pytest.mark.parametrize("source", PYTHON)
def test_it_computes_what_python_does(source):
    found = Expression(source).evaluate(NAMES)
    expected = eval(source, dict(NAMES))
    assert found == (list(expected) if isinstance(expected, range) else expected)
    assert type(found) is type(expected) or isinstance(expected, range)


def test_own_functions():
    assert Expression("index(sizes, 2)").evaluate(NAMES) == 1
    assert Expression("starts_with(name, 'qwen')").evaluate(NAMES) is True


OPERATORS = ["+", "-", "*", "//", "%", "<", "==", "and", "or"]


@given(
    st.recursive(
        st.integers(-99, 99).map(str),
        lambda inner: st.builds("({} {} {})".format, inner, st.sampled_from(OPERATORS), inner),
        max_leaves=12,
    )
)
def test_random_arithmetic(source):
    try:
        expected = eval(source)
    except ZeroDivisionError:
        with pytest.raises(ExpressionError, match="zero"):
            Expression(source).evaluate({})
        return
    assert Expression(source).evaluate({}) == expected


def test_names():
    expression = Expression("[i + a for i in range(b)] if c else kv('d')")
    assert expression.names == {"a", "b", "c", "kv", "range"}
    assert Template("{a}.x.{b + c}").names == {"a", "b", "c"}


def test_a_function_of_the_caller_hides_a_builtin():
    assert Expression("len('abc')").evaluate({"len": lambda text: -1}) == -1
    assert BUILTINS["len"] is len


def test_errors_of_the_caller_pass_through():
    class OwnError(Exception):
        pass

    def fail():
        raise OwnError

    with pytest.raises(OwnError):
        Expression("fail()").evaluate({"fail": fail})


def test_evaluation_changes_nothing():
    names = {"items": [1, 2], "i": "outside"}
    assert Expression("[i for i in items]").evaluate(names) == [1, 2]
    assert names == {"items": [1, 2], "i": "outside"}


# --- what isn't part of the language ----------------------------------------------------------

OUTSIDE = [
    "name.upper",
    "name.upper()",
    "().__class__.__base__.__subclasses__()",
    "kv.__globals__",
    "'{0.__class__}'.format(kv)",
    "f'{name}'",
    "lambda: 1",
    "(lambda: 1)()",
    "kv('a')('b')",
    "[kv][0]('a')",
    "(kv if tied else kv)('a')",
    "kv(default=1, key='a')",
    "kv(*sizes)",
    "kv(**{})",
    "{1: 2}",
    "{1, 2}",
    "{i for i in sizes}",
    "{i: i for i in sizes}",
    "(i for i in sizes)",
    "[i for i in sizes for j in sizes]",
    "[a for a, b in sizes]",
    "[i async for i in sizes]",
    "(blocks := 3)",
    "await kv('a')",
    "(yield)",
    "[*sizes]",
    "2 ** 3",
    "1 << 40",
    "1 | 2",
    "~1",
    "b'x'",
    "1j",
    "...",
]


@pytest.mark.parametrize("source", OUTSIDE)
def test_refused_when_it_is_read(source):
    with pytest.raises(ExpressionError, match="part of the language"):
        Expression(source)


@pytest.mark.parametrize(
    "source",
    ["", "1 +", "import os", "a = 1", "a; b", "if a: b", "del a", "x" * 1001, "\0", "1\n2"],
)
def test_no_expression(source):
    with pytest.raises(ExpressionError):
        Expression(source)


@pytest.mark.parametrize(
    "source",
    [
        "missing",
        "missing()",
        "blocks()",
        "__import__('os')",
        "open('/etc/passwd')",
        "eval('1')",
        "getattr(name, 'upper')",
        "globals()",
        "[i for i in range(2)] and i",
        "[_ for _ in []] + [_]",
        "sizes[9]",
        "sizes['a']",
        "sizes[1:2, 3]",
        "1 // 0",
        "1 % 0",
        "1 / 0",
        "'a' + 1",
        "'%s' % name",
        "'%099999d' % 1",
        "1 < 'a'",
        "int('x')",
        "int(1e999)",
        "int(-1e999)",
        "int(1e999 - 1e999)",
        "round(1e999)",
        "round(1, -1000000000)",
        "len(5)",
        "index(5, 1)",
        "index(sizes, 99)",
        "starts_with(5, 'a')",
        "starts_with(name, 5)",
        "str(sizes)",
        "str(kv)",
        "sum(sizes, [])",
        "sum('ab')",
        "max()",
        "kv()",
        "[[1]]",
        "[sizes for i in sizes]",
    ],
)
def test_what_can_not_be_evaluated(source):
    with pytest.raises(ExpressionError):
        Expression(source).evaluate(NAMES)


# --- bombs ------------------------------------------------------------------------------------


def nested(opening, inside, closing, times):
    return opening * times + inside + closing * times


BOMBS = {
    "a long range": "range(10000000000)",
    "a range that has no length": "range(9223372036854775808)",
    "an empty range of long ones": "[range(99999) for i in range(99999)]",
    "ranges in a row": "[len(range(99999)) for i in range(99999)]",
    "nested loops": "[any([any([k == -1 for k in range(999)]) for j in range(999)]) for i in range(999)]",
    "a long repetition": "'a' * 1000000000",
    "a long repetition of a list": "[0] * 1000000000",
    "the same from the left": "1000000000 * 'a'",
    "repetitions that grow": "'a' * 99999 * 99999",
    "many long texts": "['a' * 99999 for i in range(99999)]",
    "a text put together": "'a' * 99999 + 'a' * 99999",
    "lists of lists": "[[0] * 999] * 999 == [[0] * 999] * 999",
    "a large number": "9999999999 * 9999999999",
    "a larger number": "*".join(["9999999999"] * 80),
    "a number of many digits": "9" * 990,
    "looking through a list": "[i in sizes for i in range(99999)]",
    "comparing long texts": "[text == text + '' for i in range(99999)]",
    "adding up again and again": "[sum(sizes) for i in range(99999)]",
    "calling again and again": "[kv('width') for i in range(99999)]",
    "slices": "[len(sizes[1:]) for i in range(99999)]",
}


@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS.keys())
def test_bombs_fizzle(source):
    names = NAMES | {"sizes": list(range(50_000)), "text": "a" * 50_000}
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(ExpressionError):
            Expression(source).evaluate(names)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()
    assert time.process_time() - started < 3  # tracemalloc slows it down threefold


DEEP = {
    "parentheses": nested("(", "1", ")", 490),
    "brackets": nested("[", "1", "]", 490),
    "minus signs": "-" * 990 + "1",
    "not, not, not": "not " * 240 + "1",
    "a sum": "+".join(["1"] * 500),
    "conditions": "1 if 1 else " * 80 + "1",
    "indices": "sizes" + "[0]" * 300,
    "calls": nested("len(", "1", ")", 190),
}


@pytest.mark.parametrize("source", DEEP.values(), ids=DEEP.keys())
def test_deep_nesting_is_evaluated_or_refused(source):
    with contextlib.suppress(ExpressionError):
        assert isinstance(Expression(source).evaluate(NAMES), int)


def test_the_budget_takes_less_than_a_second():
    started = time.process_time()
    with pytest.raises(ExpressionError, match="steps"):
        Expression("[i + i * i - i // 3 for i in range(99999)]").evaluate({})
    assert time.process_time() - started < 1


def test_functions_of_the_caller_are_called_a_few_thousand_times_at_most():
    calls = []
    with pytest.raises(ExpressionError, match="steps"):
        Expression("[slow() for i in range(99999)]").evaluate({"slow": lambda: calls.append(1)})
    assert 500 < len(calls) < 3000


# --- templates --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("", ""),
        ("plain", "plain"),
        ("{name}", "qwen35"),
        ("model.layers.{blocks - 1}.mlp", "model.layers.3.mlp"),
        ("Qwen{'Moe' if tied else ''}For{name}", "QwenForqwen35"),
        ("{blocks}{blocks}", "44"),
    ],
)
def test_templates(source, text):
    assert Template(source).fill(NAMES) == text


@pytest.mark.parametrize(
    "source", ["{", "}", "{a", "a}", "{{a}}", "{a}}", "{}", "{a b}", "{name.x}"]
)
def test_templates_that_are_refused(source):
    with pytest.raises(ExpressionError):
        Template(source)


@pytest.mark.parametrize("source", ["{missing}", "{sizes}", "{kv}", "{['a' * 9999] * 9999}"])
def test_templates_that_can_not_be_filled(source):
    with pytest.raises(ExpressionError):
        Template(source).fill(NAMES)

"""Mapping tables: data that can do no harm, problems reported together, and nothing vanishing."""

import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf2st.errors import Gguf2stError, InputError, UnsupportedError, UsageError
from gguf2st.gguf import open_model
from gguf2st.mapping import TableError, find_table, load_table, load_tables, resolve
from gguf2st.mapping.loading import mappings_directory
from gguf2st.mapping.operations import Operation
from tests.gguf.files import write_gguf

SHIPPED = sorted(mappings_directory().glob("*.toml"))
TABLE = """
schema = 1
family = "Test"
architectures = ["test"]
differences = "None."

[variables]
blocks = "kv('block_count')"
experts = "kv('expert_count', 0)"

[classes.text]
class = "TestForCausalLM"
model_type = "test"
prefix = "model."

[[blocks]]
when = "layer < blocks"
prefix = "{P}layers.{layer}"

[tensors."all"]
"token_embd.weight" = "{P}embed_tokens.weight"
"blk.{layer}.attn_q.{kind}" = "{B}.q_proj.{kind}"
"""


def write(directory, text, name="test"):
    directory.mkdir(exist_ok=True)
    path = directory / f"{name}.toml"
    path.write_text(text)
    return path


def problems(path):
    """All that is wrong with a table, as one error and one line."""
    with pytest.raises(TableError) as caught:
        load_table(path)
    assert path.name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return caught.value.problems


# --- shipped tables ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_tables(path):
    table = load_table(path)
    assert table.differences or not table.architectures
    assert set(table.architectures) <= set(gguf.MODEL_ARCH_NAMES.values())
    known = {value for name, value in vars(gguf.VisionProjectorType).items() if name.isupper()}
    assert set(table.projectors) | set(table.accepts_projectors) <= known
    for group in table.groups:
        for entry in group.entries:
            assert entry.drop != ""
            assert len(entry.by) == sum(call.source[:1].isalpha() for call in entry.by)


def test_every_architecture_has_one_table():
    for kind in ("architectures", "projectors"):
        served = [name for table in load_tables() for name in getattr(table, kind)]
        assert len(served) == len(set(served))
    for table in load_tables():
        for name in table.architectures:
            assert find_table(name, Path("model.gguf")).name == table.name
    accepted = {name for table in load_tables() for name in table.accepts_projectors}
    assert accepted == {name for table in load_tables() for name in table.projectors}


# --- everything wrong at once -----------------------------------------------------------------


def test_all_problems_are_reported_together(tmp_path):
    path = write(
        tmp_path,
        """
        schema = 2
        architectures = ["x"]
        flavour = "unknown key"
        family = 5
        [variables]
        a = "1 +"
        b = "kv.__class__"
        [checks]
        "c" = "lambda: 1"
        [[blocks]]
        when = "layer <"
        prefix = "{P"
        wen = "True"
        [classes.text]
        class = "{a.b}"
        colour = "red"
        [classes.other]
        prefix = ""
        [tensors."x"]
        when = "import"
        "one" = 5
        "two" = { to = "a", drop = "b" }
        "three" = { by = "add(1)" }
        "four" = { to = "a", by = "subtract(1)" }
        "five" = { to = "a", dtype = "f8" }
        "six" = { to = "a", how = "fast" }
        "seven.{number}" = "a"
        "eight.{layer}.{layer}" = "a"
        "nine" = { to = "{a" }
        "ten" = { drop = 7 }
        "eleven" = { to = [] }
        [fused]
        a = ["{B"]
        b = "{B}.x"
        [config]
        loose = "1"
        [config.derived]
        d = "x.y"
        [files."../evil.json".derived]
        [files."good.json".constants]
        [unquantized]
        "*" = 1
        """,
    )
    found = problems(path)
    words = [
        "schema must be 1",
        "differences must say",
        "'flavour' isn't known",
        "'family' must be a text",
        "variables.a",
        "variables.b",
        "checks.c",
        "blocks[0].when",
        "blocks[0].prefix",
        "'blocks[0].wen' isn't known",
        "classes.text",
        "'classes.text.colour' isn't known",
        "'classes.other' isn't known",
        "tensors.'x': ",
        "'one'",
        "'two'",
        "'three'",
        "'subtract'",
        "dtype must be one of",
        "'how'",
        "'seven.{number}'",
        "'eight.{layer}.{layer}'",
        "'nine'",
        "'ten'",
        "'eleven'",
        "fused.a",
        "'fused.b' must be a list",
        "'config.loose' isn't known",
        "config.derived.d",
        "'../evil.json'",
        "'unquantized.*' must be a text",
    ]
    for word in words:
        assert any(word in problem for problem in found), word
    assert len(found) == len(words)


WRONG_KINDS = ["5", "'text'", "[1]", "['a']", "{ a = 1 }", "{ a = ['b'] }", "true", "1979-05-27"]
PLACES = [
    "architectures",
    "projectors",
    "differences",
    "extends",
    "schema",
    "component",
    "variables",
    "variables.a",
    "checks",
    "checks.a",
    "classes",
    "classes.text",
    "classes.text.prefix",
    "classes.multimodal.projectors",
    "blocks",
    "tensors",
    "tensors.a",
    "tensors.a.when",
    "tensors.a.optional",
    "tensors.a.component",
    "tensors.a.b",
    "tensors.a.b.to",
    "tensors.a.b.by",
    "tensors.a.b.when",
    "tensors.a.b.drop",
    "tensors.a.b.dtype",
    "fused",
    "fused.a",
    "unquantized",
    "config",
    "config.derived",
    "config.derived.a",
    "config.constants",
    "files",
    "files.a",
    "tokenizer",
]


@pytest.mark.parametrize("place", PLACES)
def test_a_value_of_the_wrong_kind_is_a_problem_or_harmless(tmp_path, place):
    refused = 0
    for value in WRONG_KINDS:
        path = write(
            tmp_path,
            f"schema = 1\n{place} = {value}\n" if place != "schema" else f"schema = {value}",
        )
        try:
            load_table(path)
        except TableError:
            refused += 1
    assert refused >= 4


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"schema = ", "can't be read"),
        (b"\xff\xfe", "can't be read"),
        (b"a = 1\na = 2", "can't be read"),
        (b"a = " + b"[" * 5000 + b"]" * 5000, "nested too deeply"),
        (b"schema = 1\n[config.constants]\n" + b"a." * 5000 + b"b = 1", "nested too deeply"),
        (b"schema = " + b"9" * 5000, "can't be read"),
    ],
)
def test_broken_files(tmp_path, raw, words):
    path = tmp_path / "test.toml"
    path.write_bytes(raw)
    assert any(words in problem for problem in problems(path))


def test_missing_files(tmp_path):
    assert "can't be read (No such file" in problems(tmp_path / "none.toml")[0]
    with pytest.raises(UsageError, match="isn't a directory of mapping tables"):
        load_tables(tmp_path / "none")


# --- tables of strangers ----------------------------------------------------------------------

ATTACKS = [
    "__import__('os').system('touch {target}')",
    "open('{target}', 'w')",
    "exec(\"open('{target}', 'w')\")",
    "().__class__.__base__.__subclasses__()",
    "[c for c in kv.__self__]",
    "(lambda: open('{target}', 'w'))()",
    "kv.__func__.__globals__",
]
LAST = '"blk.{layer}.attn_q.{kind}" = "{B}.q_proj.{kind}"\n'
# (what stands in the table, what the stranger puts there or after it)
EXPRESSION_PLACES = [
    ("[variables]", "[variables]\nx = SOURCE"),
    ("[variables]", "[checks]\nx = SOURCE\n[variables]"),
    ('when = "layer < blocks"', "when = SOURCE"),
    ('[tensors."all"]', '[tensors."all"]\nwhen = SOURCE'),
    (LAST, '"blk.{layer}.attn_q.{kind}" = { to = "a", when = SOURCE }'),
    (LAST, '"blk.{layer}.attn_q.{kind}" = { to = "a", by = SOURCE }'),
    (LAST, LAST + "[config.derived]\nx = SOURCE"),
    (LAST, LAST + '[files."x.json".derived]\nx = SOURCE'),
]


@pytest.mark.parametrize("place", EXPRESSION_PLACES)
@pytest.mark.parametrize("attack", ATTACKS)
def test_code_is_not_run(tmp_path, place, attack):
    target = tmp_path / "touched"
    source = attack.replace("{target}", str(target))
    old, new = place
    assert old in TABLE
    directory = tmp_path / "tables"
    write(directory, TABLE.replace(old, new.replace("SOURCE", f"'''{source}'''")))
    with pytest.raises(Gguf2stError):
        resolution = resolve(model(tmp_path), directory)
        for fields in (resolution.table.config, *resolution.table.files.values()):
            for expression in fields.derived.values():
                try:
                    expression.evaluate(resolution.text)
                except ValueError as error:
                    raise InputError(str(error)) from error
    assert not target.exists()


@pytest.mark.parametrize(
    "name",
    [
        "../secret",
        "/etc/hostname",
        "..",
        "sub/secret",
        "sub\\\\secret",
        "",
        "test",
        "~/secret",
        "a b",
    ],
)
def test_other_files_are_not_read(tmp_path, name):
    secret = 'schema = 1\n[config.constants]\nsecret = "12345"\n'
    for place in (tmp_path, tmp_path / "tables" / "sub"):
        place.mkdir(parents=True, exist_ok=True)
        (place / "secret.toml").write_text(secret)
    path = write(tmp_path / "tables", TABLE.replace("family", f'extends = "{name}"\nfamily'))
    assert "12345" not in str(problems(path))


@pytest.mark.parametrize(
    "name",
    [
        "../x.json",
        "/tmp/x.json",
        "a/b.json",
        "a\\\\b.json",
        "x.py",
        ".json",
        "..json",
        "x.json\\n",
        "x",
    ],
)
def test_other_files_are_not_written(tmp_path, name):
    path = write(tmp_path, TABLE + f'\n[files."{name}".constants]\na = 1\n')
    assert any("isn't a plain name" in problem for problem in problems(path))


def test_a_circle_of_tables(tmp_path):
    for name, parent in (("a", "b"), ("b", "c"), ("c", "a")):
        write(tmp_path, f'schema = 1\nextends = "{parent}"\n', name)
    assert any("isn't the name of another table" in text for text in problems(tmp_path / "a.toml"))


@pytest.mark.parametrize(
    "bomb",
    [
        "[i for i in range(99999) if has('blk.{layer}.x')]",
        "len([len(range(99999)) for i in range(99999)])",
        "round(1, -1000000000)",
        "shape('token_embd.weight') * 99999999",
    ],
)
def test_a_table_can_not_hang(tmp_path, bomb):
    directory = tmp_path / "tables"
    write(directory, TABLE.replace("[variables]", f'[variables]\nx = "{bomb}"'))
    started = time.process_time()
    with pytest.raises(InputError, match="x can't be derived"):
        resolve(model(tmp_path), directory)
    assert time.process_time() - started < 2


# --- inheritance ------------------------------------------------------------------------------


def test_inheritance(tmp_path):
    write(
        tmp_path,
        TABLE
        + """
        "old.weight" = { to = "{P}old.weight", by = "add(1)" }
        "gone.weight" = "{P}gone.weight"
        [tensors."optional"]
        optional = true
        "extra.weight" = "{P}extra.weight"
        [tensors."removed"]
        "removed.weight" = "{P}removed.weight"
        [config.derived]
        kept = "1"
        gone = "2"
        changed = "3"
        [config.constants]
        text = "a"
        flag = true
        list = [1, 2]
        """,
        "base",
    )
    child = write(
        tmp_path,
        """
        schema = 1
        extends = "base"
        architectures = ["child"]
        differences = "Some."
        [variables]
        more = "2"
        [tensors]
        removed = false
        [tensors."all"]
        "gone.weight" = false
        "old.weight" = "{P}new.weight"
        "own.weight" = "{P}own.weight"
        [tensors."optional"]
        optional = false
        [config.derived]
        gone = false
        changed = "30"
        [config.constants]
        text = false
        flag = false
        list = [3]
        """,
        "child",
    )
    table = load_table(child)
    assert (table.family, table.architectures) == ("child", ("child",))
    assert list(table.variables) == ["blocks", "experts", "more"]
    entries = {entry.parts[0].source: entry for group in table.groups for entry in group.entries}
    assert list(entries) == [
        "token_embd.weight",
        "blk.{layer}.attn_q.{kind}",
        "old.weight",
        "own.weight",
        "extra.weight",
    ]
    assert entries["old.weight"].by == ()
    assert [group.optional for group in table.groups] == [False, False]
    derived = {name: expression.source for name, expression in table.config.derived.items()}
    assert derived == {"kept": "1", "changed": "30"}
    assert table.config.constants == {"flag": False, "list": [3]}
    assert load_table(tmp_path / "base.toml").config.constants["text"] == "a"


def test_nothing_to_remove_is_a_problem(tmp_path):
    path = write(tmp_path, TABLE + '"missing.weight" = false\n')
    assert any("'missing.weight'" in problem for problem in problems(path))


# --- resolving --------------------------------------------------------------------------------

WEIGHT = np.arange(32, dtype=np.float32).reshape(4, 8)
TENSORS = {
    "token_embd.weight": WEIGHT,
    "blk.0.attn_q.weight": WEIGHT,
    "blk.1.attn_q.weight": WEIGHT,
    "blk.1.attn_q.bias": WEIGHT[0],
}


def model(tmp_path, tensors=None, keys=None, architecture="test"):
    keys = {f"{architecture}.block_count": 2} | (keys or {})
    tensors = TENSORS if tensors is None else tensors
    return open_model(write_gguf(tmp_path / "m.gguf", keys, tensors, architecture=architecture))


def resolved(tmp_path, extra="", tensors=None, keys=None, table=TABLE):
    directory = tmp_path / "tables"
    write(directory, table + extra)
    return resolve(model(tmp_path, TENSORS | (tensors or {}), keys), directory)


def refusal(error, *arguments, **options):
    with pytest.raises(error) as caught:
        resolved(*arguments, **options)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message


def without(name):
    return {key: value for key, value in TENSORS.items() if key != name}


def test_a_plain_table(tmp_path):
    found = resolved(tmp_path)
    assert {recipe.name: recipe.shape for recipe in found.recipes} == {
        "model.embed_tokens.weight": (4, 8),
        "model.layers.0.q_proj.weight": (4, 8),
        "model.layers.1.q_proj.weight": (4, 8),
        "model.layers.1.q_proj.bias": (8,),
    }
    for recipe in found.recipes:
        rows = int(np.prod(recipe.shape[:-1]))
        np.testing.assert_array_equal(recipe.view().read(0, rows).ravel()[:8], WEIGHT[0])


def test_an_unknown_architecture(tmp_path):
    directory = tmp_path / "tables"
    write(directory, TABLE)
    with pytest.raises(UnsupportedError) as caught:
        resolve(model(tmp_path, architecture="tests"), directory)
    for words in ("architecture 'tests'", "nearest: test)", "gguf2st archs", "CONTRIBUTING.md"):
        assert words in str(caught.value)


def test_a_tensor_in_no_entry(tmp_path):
    message = refusal(UnsupportedError, tmp_path, tensors={"blk.0.attn_qq.weight": WEIGHT})
    for words in (
        "tensor blk.0.attn_qq.weight (4, 8) (F32) is in no entry of test.toml",
        "nearest: blk.{layer}.attn_q.{kind}",
        "CONTRIBUTING.md",
    ):
        assert words in message


def test_a_missing_tensor(tmp_path):
    directory = tmp_path / "tables"
    write(directory, TABLE)
    with pytest.raises(InputError) as caught:
        resolve(model(tmp_path, without("blk.0.attn_q.weight")), directory)
    assert "lacks tensor blk.0.attn_q.weight" in str(caught.value)
    assert "model.layers.0.q_proj.weight would be missing" in str(caught.value)


PAIR = '"a.{layer}.x + a.{layer}.y" = { to = "{B}.xy", by = "cat(0)" }\n'


def test_a_pair(tmp_path):
    tensors = {f"a.{layer}.{part}": WEIGHT + layer for layer in (0, 1) for part in "yx"}
    found = resolved(tmp_path, PAIR, tensors)
    recipe = next(recipe for recipe in found.recipes if recipe.name == "model.layers.1.xy")
    assert [source.tensor.name for source in recipe.sources] == ["a.1.x", "a.1.y"]
    assert recipe.operations == ("cat(0)",)
    values = recipe.view().read(0, 8)
    np.testing.assert_array_equal(values, np.concatenate([WEIGHT, WEIGHT]) + 1)


@pytest.mark.parametrize(("there", "missing"), [("x", "y"), ("y", "x")])
def test_half_a_pair(tmp_path, there, missing):
    message = refusal(InputError, tmp_path, PAIR, {f"a.0.{there}": WEIGHT})
    assert f"has tensor a.0.{there} but not a.0.{missing}" in message


def test_a_pair_that_does_not_fit(tmp_path):
    tensors = {"a.0.x": WEIGHT, "a.0.y": WEIGHT[:, :4]}
    message = refusal(InputError, tmp_path, PAIR, tensors)
    for words in ("a.0.x (4, 8)", "a.0.y (4, 4)", "can't be rearranged by cat(0)"):
        assert words in message


def test_one_output_from_two_tensors(tmp_path):
    extra = '[tensors."other"]\noptional = true\n"b.{layer}" = "{B}.q_proj.weight"\n'
    message = refusal(InputError, tmp_path, extra, {"b.0": WEIGHT})
    assert "both" in message
    assert "give model.layers.0.q_proj.weight" in message


def test_a_dropped_tensor(tmp_path):
    found = resolved(tmp_path, '"rope.{layer}" = { drop = "computed" }\n', {"rope.1": WEIGHT})
    assert [(d.tensor.name, d.reason) for d in found.dropped] == [("rope.1", "computed")]
    assert len(found.recipes) == len(TENSORS)


def test_conditions(tmp_path):
    extra = """
    [tensors."first layer"]
    when = "layer == 0"
    "c.{layer}" = "{B}.first"
    [tensors."other layers"]
    "c.{layer}" = { to = "{B}.other", when = "layer > 0" }
    """
    found = resolved(tmp_path, extra, {"c.0": WEIGHT, "c.1": WEIGHT})
    names = {recipe.sources[0].tensor.name: recipe.name for recipe in found.recipes}
    assert names["c.0"] == "model.layers.0.first"
    assert names["c.1"] == "model.layers.1.other"


def test_experts(tmp_path):
    extra = '"e.{layer}" = { to = "{B}.experts.{expert}.w", by = "unstack(0)" }\n'
    tensors = {f"e.{layer}": np.stack([WEIGHT, WEIGHT + 1, WEIGHT + 2]) for layer in (0, 1)}
    found = resolved(tmp_path, extra, tensors, {"test.expert_count": 3})
    recipes = {recipe.name: recipe for recipe in found.recipes if ".experts." in recipe.name}
    assert len(recipes) == 6
    values = recipes["model.layers.1.experts.2.w"].view().read(0, 4)
    np.testing.assert_array_equal(values, WEIGHT + 2)


def test_too_few_experts(tmp_path):
    extra = '"e.{layer}" = { to = "{B}.experts.{expert}.w", by = "unstack(0)" }\n'
    tensors = {f"e.{layer}": np.stack([WEIGHT, WEIGHT]) for layer in (0, 1)}
    message = refusal(InputError, tmp_path, extra, tensors, {"test.expert_count": 3})
    assert "model.layers.0.experts.2.w would be missing" in message


def test_a_wrong_number_of_names(tmp_path):
    extra = '"s" = { to = ["a", "b"], by = "unstack(0)" }\n'
    message = refusal(InputError, tmp_path, extra, {"s": np.stack([WEIGHT] * 3)})
    assert "s makes 3 tensors but names 2" in message


def test_a_check_that_fails(tmp_path):
    extra = '[checks]\n"the width is odd" = "shape(\'token_embd.weight\')[1] == 9"\n'
    message = refusal(InputError, tmp_path, extra)
    assert "contradicts itself: the width is odd" in message


def test_a_missing_key(tmp_path):
    table = TABLE.replace("'block_count'", "'missing'")
    assert "lacks the key test.missing" in refusal(InputError, tmp_path, table=table)


def test_why_a_tensor_stays_as_it_is(tmp_path):
    extra = """
    "n.weight" = "{P}norm.weight"
    "o.weight" = { to = "o.weight", dtype = "f32" }
    [fused]
    qq = ["{B}.q_proj", "{B}.r_proj"]
    [unquantized]
    "*embed_tokens.weight" = "looked up by row"
    """
    found = resolved(tmp_path, extra, {"n.weight": WEIGHT[0], "o.weight": WEIGHT})
    recipes = {recipe.name: recipe for recipe in found.recipes}
    assert recipes["model.embed_tokens.weight"].unquantized == "looked up by row"
    assert recipes["model.norm.weight"].unquantized == "not a matrix"
    assert recipes["model.layers.1.q_proj.bias"].unquantized == "not a matrix"
    assert recipes["model.layers.0.q_proj.weight"].unquantized is None
    assert recipes["model.layers.0.q_proj.weight"].fused == "model.layers.0:qq"
    assert recipes["model.norm.weight"].fused is None
    assert (recipes["o.weight"].dtype, recipes["model.norm.weight"].dtype) == ("f32", None)


def test_scales_of_nvfp4_are_not_tensors_of_their_own(tmp_path):
    packed = (np.zeros((4, 36), np.uint8), gguf.GGMLQuantizationType(40))
    tensors = {
        "blk.0.attn_q.weight": packed,
        "blk.0.attn_q.scale": np.float32([2]),
        "blk.0.attn_q.input_scale": np.float32([3]),
    }
    found = resolved(tmp_path, tensors=tensors)
    recipe = next(r for r in found.recipes if r.name == "model.layers.0.q_proj.weight")
    assert recipe.sources[0].scale.name == "blk.0.attn_q.scale"
    assert [dropped.tensor.name for dropped in found.dropped] == ["blk.0.attn_q.input_scale"]


@pytest.mark.parametrize("name", sorted(n for n in Operation.registry if not n.startswith("_")))
def test_operations_with_nonsense_arguments(tmp_path, name):
    """Whatever a table asks for, a sentence comes back."""
    for arguments in ("", "0", "'x'", "-1, 7", "1, [2, 3]", "9, 9, 9", "0, add(1)"):
        directory = tmp_path / f"tables{arguments.encode().hex()}"
        write(directory, TABLE + f'"w" = {{ to = "w", by = "{name}({arguments})" }}\n')
        try:
            found = resolve(model(tmp_path, TENSORS | {"w": WEIGHT}), directory)
            next(recipe for recipe in found.recipes if recipe.name == "w")
        except Gguf2stError as error:
            assert "\n" not in str(error)

"""Every operation against plain torch code, piece by piece, and undone again."""

import re
import tracemalloc
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from gguf2st.gguf import GgufFile
from gguf2st.mapping.calls import OperationCall
from gguf2st.mapping.expression import ExpressionError
from gguf2st.mapping.operations import Operation
from gguf2st.mapping.view import ROW_MASK, Source, View
from tests.gguf.files import write_gguf

NAMES = {"heads": 4, "key_heads": 2, "ratio": 3}


def views_of(path, arrays, kind=Kind.F32):
    """Views of tensors in a file, and what gguf-py makes of the stored blocks."""
    if kind is Kind.F32:
        stored = {f"t{number}": array for number, array in enumerate(arrays)}
    else:
        stored = {
            f"t{number}": (gguf.quants.quantize(array, kind), kind)
            for number, array in enumerate(arrays)
        }
    file = GgufFile(write_gguf(path, {}, stored))
    values = [
        torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).copy()).reshape(a.shape)
        for t, a in zip(gguf.GGUFReader(path).tensors, arrays, strict=True)
    ]
    # A GGUF drops no axes here, so that shapes are those of the arrays.
    sources = tuple(Source(file.tensors[name]) for name in stored)
    return [View.of(sources, number) for number in range(len(sources))], values


def some(*shapes):
    random = np.random.default_rng(len(shapes))
    return [random.standard_normal(shape, np.float32) for shape in shapes]


def bind(source):
    return OperationCall(source).bind(NAMES)


def whole(view):
    rows = int(np.prod(view.shape[:-1]))
    return torch.from_numpy(view.read(0, rows)).reshape(view.shape)


def halves_to_pairs(heads):
    """LlamaModel.permute of llama.cpp's converter."""
    return lambda w: (
        w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)
    )


def pairs_to_halves(heads):
    return lambda w: (
        w.reshape(heads, w.shape[0] // heads // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)
    )


def tiled_to_grouped(w, key_heads, ratio, dim, offset=0, axis=0):
    """From [v0 of all key heads, v1 of all key heads, ...] to all values of each key head."""
    w = w.movedim(axis, 0)
    order = [
        offset + (value * key_heads + head) * dim + within
        for head in range(key_heads)
        for value in range(ratio)
        for within in range(dim)
    ]
    return w[[*range(offset), *order]].movedim(0, axis)


def grouped(parts, heads):
    blocks = [torch.chunk(part, heads) for part in parts]
    return torch.cat([block[head] for head in range(heads) for block in blocks])


def alternating(*parts):
    """One row of each, then the next ones, row by row."""
    count = parts[0].shape[-2]
    rows = [part[..., row : row + 1, :] for row in range(count) for part in parts]
    return torch.cat(rows, -2)


# (call, input shapes, the same in torch, whether Q8_0 blocks can move packed)
EACH, MATRIX, EXPERTS = (24,), (24, 64), (3, 8, 64)
CASES = [
    ("add(-1)", [MATRIX, EXPERTS], lambda a, b: [a - 1, b - 1], False),
    ("add(0.1)", [(64,)], lambda a: [a + np.float32(0.1)], False),
    ("neg_exp()", [MATRIX], lambda a: [-torch.exp(a)], False),
    ("rope_unpermute(heads)", [MATRIX], lambda a: [pairs_to_halves(4)(a)], True),
    ("rope_unpermute(1)", [MATRIX, MATRIX], lambda *a: list(map(pairs_to_halves(1), a)), True),
    ("rope_unpermute(2)", [(64,)], lambda a: [pairs_to_halves(2)(a)], False),
    ("rope_permute(heads)", [MATRIX], lambda a: [halves_to_pairs(4)(a)], True),
    ("rope_permute(2)", [(64,)], lambda a: [halves_to_pairs(2)(a)], False),
    (
        "value_heads(key_heads, ratio, 4)",
        [MATRIX],
        lambda a: [tiled_to_grouped(a, 2, 3, 4)],
        True,
    ),
    (
        "value_heads(2, 4, 2, 8)",
        [MATRIX],
        lambda a: [tiled_to_grouped(a, 2, 4, 2, 8)],
        True,
    ),
    (
        "value_heads(2, 2, 16, 0, -1)",
        [MATRIX],
        lambda a: [tiled_to_grouped(a, 2, 2, 16, 0, -1)],
        False,
    ),
    (
        "value_heads(2, 3, 32, 64, 1)",
        [(5, 256)],
        lambda a: [tiled_to_grouped(a, 2, 3, 32, 64, 1)],
        True,
    ),
    ("value_heads(2, 2, 16)", [(64,)], lambda a: [tiled_to_grouped(a, 2, 2, 16)], False),
    (
        "group_by_key_head(4)",
        [(8, 64), (8, 64), (16, 64), (4, 64)],
        lambda *a: [grouped(a, 4)],
        True,
    ),
    (
        "split_by_key_head(4, [8, 12, 4])",
        [MATRIX],
        lambda a: [
            torch.cat([a[6 * h + begin : 6 * h + end] for h in range(4)])
            for begin, end in ((0, 2), (2, 5), (5, 6))
        ],
        True,
    ),
    ("cat(0)", [(3, 64), (5, 64), (1, 64)], lambda *a: [torch.cat(a)], True),
    ("cat(1)", [EXPERTS, (3, 2, 64)], lambda *a: [torch.cat(a, 1)], True),
    ("split(0, [1, 20, 3])", [MATRIX], lambda a: list(a.split([1, 20, 3])), True),
    ("split(1, [6, 2])", [EXPERTS], lambda a: list(a.split([6, 2], 1)), True),
    ("stack(0)", [MATRIX] * 3, lambda *a: [torch.stack(a)], True),
    ("stack(1)", [MATRIX] * 2, lambda *a: [torch.stack(a, 1)], True),
    ("stack(0)", [(64,)] * 2, lambda *a: [torch.stack(a)], True),
    ("unstack(0)", [EXPERTS], lambda a: list(a.unbind()), True),
    ("unstack(1)", [EXPERTS], lambda a: list(a.unbind(1)), True),
    ("unsqueeze(1)", [MATRIX], lambda a: [a.unsqueeze(1)], True),
    ("unsqueeze(0)", [(64,)], lambda a: [a.unsqueeze(0)], True),
    ("squeeze(1)", [(6, 1, 64)], lambda a: [a.squeeze(1)], True),
    ("as_matrix()", [(64,)], lambda a: [a.reshape(1, 64)], True),
    ("as_matrix()", [MATRIX], lambda a: [a], True),
    ("transpose()", [MATRIX], lambda a: [a.T], False),
    ("transpose()", [EXPERTS], lambda a: [a.mT], False),
    (
        "at(1, rope_unpermute(heads))",
        [MATRIX, MATRIX],
        lambda a, b: [a, pairs_to_halves(4)(b)],
        True,
    ),
    (
        "at(0, split(0, [4, 20]))",
        [MATRIX, (8, 64)],
        lambda a, b: [a[:4], a[4:], b],
        True,
    ),
    ("at(1, cat(0), 2)", [MATRIX] * 4, lambda a, b, c, d: [a, torch.cat([b, c]), d], True),
    ("at(0, at(0, unstack(0)))", [EXPERTS, MATRIX], lambda a, b: [*a.unbind(), b], True),
    ("neg_log()", [MATRIX], lambda a: [torch.log(-a)], False),
    ("interleave()", [MATRIX] * 2, lambda a, b: [alternating(a, b)], True),
    ("interleave()", [EXPERTS] * 3, lambda *a: [alternating(*a)], True),
    ("interleave()", [(4, 1, 64)] * 2, lambda a, b: [torch.cat([a, b], 1)], True),
    ("deinterleave(2)", [MATRIX], lambda a: [a[0::2], a[1::2]], True),
    ("deinterleave(4)", [EXPERTS], lambda a: [a[:, number::4] for number in range(4)], True),
]
# Of tensors whose rows are single numbers, which no block type holds.
ELEMENTS = [
    ("by_element()", [(3, 64), (64,)], lambda a, b: [a.unsqueeze(-1), b.unsqueeze(-1)]),
    ("join_elements()", [(3, 8, 1), (5, 1)], lambda a, b: [a.squeeze(-1), b.squeeze(-1)]),
]
IDS = [f"{number} {case[0]}" for number, case in enumerate(CASES)]


def inputs(call, shapes):
    return [-abs(a) - 0.1 for a in some(*shapes)] if "log" in call else some(*shapes)


def test_every_operation_has_a_case():
    calls = " ".join(case[0] for case in (*CASES, *ELEMENTS))
    named = set(re.findall(r"[a-z_]+(?=\()", calls))
    assert named == {name for name in Operation.registry if not name.startswith("_")}


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize(("call", "shapes", "in_torch", "packed"), CASES, ids=IDS)
def test_operations(tmp_path, call, shapes, in_torch, packed, kind):
    views, values = views_of(tmp_path / "a.gguf", inputs(call, shapes), kind)
    made, expected = bind(call).apply(views), in_torch(*values)
    assert [view.shape for view in made] == [tuple(value.shape) for value in expected]
    for view, value in zip(made, expected, strict=True):
        assert view.elements == value.numel()
        torch.testing.assert_close(whole(view), value.contiguous(), rtol=2e-6, atol=0)
        check_pieces(view)
        arithmetic = bool(view.functions) or view.transposed
        assert view.acts_on_packed_rows() == (packed if kind is Kind.Q8_0 else not arithmetic)
        if view.acts_on_packed_rows():
            assert (move_packed(view, kind) == whole(view).numpy().reshape(-1)).all()


@pytest.mark.parametrize(
    ("call", "shapes", "in_torch"), ELEMENTS, ids=[case[0] for case in ELEMENTS]
)
def test_operations_on_single_elements(tmp_path, call, shapes, in_torch):
    views, values = views_of(tmp_path / "a.gguf", some(*shapes))
    made, expected = bind(call).apply(views), in_torch(*values)
    for view, value in zip(made, expected, strict=True):
        assert (view.shape, view.elements) == (tuple(value.shape), value.numel())
        torch.testing.assert_close(whole(view), value.contiguous(), rtol=0, atol=0)
        check_pieces(view)


def check_pieces(view):
    """Reading pieces of any size is reading it at once."""
    rows = int(np.prod(view.shape[:-1]))
    complete = view.read(0, rows)
    for size in {1, 5, rows - 1} - {0}:
        pieces = [view.read(start, min(rows, start + size)) for start in range(0, rows, size)]
        np.testing.assert_array_equal(np.concatenate(pieces), complete)


def move_packed(view, kind):
    """Values after moving whole packed blocks, decoded by gguf-py."""
    tensors = [source.tensor for source in view.sources]
    moved = []
    for number in view.rows.reshape(-1):
        tensor, row = tensors[number >> 40], int(number & ROW_MASK)
        blocks = tensor.read_rows(row, row + 1).reshape(-1, tensor.kind.block_bytes)
        if view.columns is not None:
            blocks = blocks[view.columns[:: tensor.kind.block_size] // tensor.kind.block_size]
        moved.append(blocks)
    raw = np.concatenate(moved).reshape(-1)
    return gguf.quants.dequantize(raw.view(np.float32) if kind is Kind.F32 else raw, kind)


@pytest.mark.parametrize(
    ("call", "shapes"),
    [case[:2] for case in (*CASES, *ELEMENTS)],
    ids=[*IDS, *(case[0] for case in ELEMENTS)],
)
def test_inverses(tmp_path, call, shapes):
    views, values = views_of(tmp_path / "a.gguf", inputs(call, shapes))
    operation = bind(call)
    made = operation.apply(views)
    restored = operation.inverse(shapes).apply(made)
    assert [view.shape for view in restored] == shapes
    exact = not any(view.functions for view in restored)
    for view, value in zip(restored, values, strict=True):
        torch.testing.assert_close(whole(view), value, rtol=0, atol=0 if exact else 1e-6)
    # The inverse has an inverse, which is the operation.
    back = operation.inverse(shapes).inverse([view.shape for view in made]).apply(views)
    for view, other in zip(back, made, strict=True):
        torch.testing.assert_close(whole(view), whole(other), rtol=0, atol=0 if exact else 1e-6)


# --- the examples of the docstrings -----------------------------------------------------------


def examples():
    for name, kind in Operation.registry.items():
        if name.startswith("_"):
            continue
        found = re.search(r"Example: (\S.*\)): (.*) -> (.*)", kind.__doc__ or "")
        assert found, f"{name} has no example"
        yield name, *found.groups()


def symbols(text, numbers):
    """The arrays "[a b], [c d]" or "[[a b] [c d]]" with each word as its number."""
    as_lists = re.sub(r"\]\s+\[", "], [", re.sub(r"(?<=[\w.])\s+(?=[\w.-])", ", ", text))
    as_numbers = re.sub(r"[A-Za-z]\w*", lambda m: str(numbers[m[0]]), as_lists)
    return [np.array(part, np.float32) for part in eval(f"[{as_numbers}]")]


@pytest.mark.parametrize(("name", "call", "before", "after"), list(examples()))
def test_examples(tmp_path, name, call, before, after):
    assert call.startswith(name + "(")
    if before.startswith("shape "):
        shapes = [eval(text.removeprefix("shape ")) for text in (before, after)]
        views, _ = views_of(tmp_path / "a.gguf", some(shapes[0]))
        assert bind(call).apply(views)[0].shape == shapes[1]
        return
    words = sorted(set(re.findall(r"[a-z]\w*", before.removeprefix("rows "))))
    numbers = {word: number for number, word in enumerate(words)}
    given = symbols(before.removeprefix("rows "), numbers)
    expected = symbols(after, numbers)
    # Each symbol is a row of two.
    views, _ = views_of(tmp_path / "a.gguf", [np.stack([part, part], -1) for part in given])
    made = bind(call).apply(views)
    assert len(made) == len(expected)
    for view, value in zip(made, expected, strict=True):
        np.testing.assert_allclose(whole(view), np.stack([value, value], -1), atol=1e-6)


# --- several operations and several sources ---------------------------------------------------


def follow(views, *calls):
    for call in calls:
        views = bind(call).apply(views)
    return views


def test_a_fused_projection_like_qwen3_next(tmp_path):
    """[q; k; v] and z to [q k v z] per key head, rows of three types."""
    views, (qkv, z) = views_of(tmp_path / "a.gguf", some((32, 64), (16, 64)))
    (made,) = follow(views, "at(0, split(0, [8, 8, 16]))", "group_by_key_head(4)")
    torch.testing.assert_close(whole(made), grouped([*qkv.split([8, 8, 16]), z], 4))
    check_pieces(made)


def test_experts_like_qwen3_vl(tmp_path):
    views, (gate, up) = views_of(tmp_path / "a.gguf", some((3, 8, 96), (3, 8, 96)), Kind.Q8_0)
    (made,) = follow(views, "cat(1)", "transpose()")
    torch.testing.assert_close(whole(made), torch.cat([gate, up], 1).mT.contiguous())
    check_pieces(made)


def test_experts_like_gpt_oss(tmp_path):
    """Gate and up alternate, and what is stored (in, out) is transposed."""
    views, (gate, up) = views_of(tmp_path / "a.gguf", some((3, 8, 96), (3, 8, 96)), Kind.Q8_0)
    (made,) = follow(views, "interleave()", "transpose()")
    expected = np.empty((3, 96, 16), np.float32)
    expected[..., 0::2], expected[..., 1::2] = gate.mT, up.mT
    np.testing.assert_array_equal(whole(made), expected)
    check_pieces(made)


def test_biases_like_gpt_oss(tmp_path):
    views, (gate, up) = views_of(tmp_path / "a.gguf", some((3, 8), (3, 8)))
    (made,) = follow(views, "by_element()", "interleave()", "join_elements()")
    expected = np.empty((3, 16), np.float32)
    expected[:, 0::2], expected[:, 1::2] = gate, up
    np.testing.assert_array_equal(whole(made), expected)
    check_pieces(made)


@pytest.mark.parametrize(
    ("calls", "shapes", "kind", "message"),
    [
        (["by_element()"], [(4, 64)], Kind.Q8_0, "only unquantized"),
        (["value_heads(2, 2, 16, 0, -1)", "by_element()"], [(4, 64)], Kind.F32, "own order"),
        (["join_elements()"], [(4, 64)], Kind.F32, "64 elements"),
        (["deinterleave(3)"], [(4, 64)], Kind.F32, "4 rows"),
        (["deinterleave(0)"], [(4, 64)], Kind.F32, "0"),
        (["interleave()"], [(4, 64), (4, 32)], Kind.F32, "can't be joined"),
        (["interleave()"], [(4, 64), (6, 64)], Kind.F32, "can't be joined|shape"),
        (["interleave()"], [(64,), (64,)], Kind.F32, "rows"),
        (["deinterleave(2)"], [(64,)], Kind.F32, "rows"),
    ],
)
def test_rows_that_do_not_alternate(tmp_path, calls, shapes, kind, message):
    views, _ = views_of(tmp_path / "a.gguf", some(*shapes), kind)
    with pytest.raises(ValueError, match=message):
        follow(views, *calls)


def test_a_transposed_view_with_reordered_columns_and_arithmetic(tmp_path):
    views, (value,) = views_of(tmp_path / "a.gguf", some((24, 64)), Kind.Q8_0)
    (made,) = follow(views, "value_heads(2, 2, 16, 0, -1)", "add(1)", "transpose()", "add(1)")
    expected = tiled_to_grouped(value, 2, 2, 16, 0, -1).T + 1 + 1
    torch.testing.assert_close(whole(made), expected.contiguous())
    check_pieces(made)


def test_arithmetic_before_joining(tmp_path):
    views, values = views_of(tmp_path / "a.gguf", some((4, 64), (6, 64)))
    (made,) = follow(views, "add(-1)", "cat(0)")
    torch.testing.assert_close(whole(made), torch.cat(values) - 1)


def test_sources_of_different_types(tmp_path):
    first, second = some((4, 64), (6, 64))
    packed = gguf.quants.quantize(second, Kind.Q8_0)
    path = write_gguf(tmp_path / "a.gguf", {}, {"a": first, "b": (packed, Kind.Q8_0)})
    tensors = GgufFile(path).tensors
    sources = (Source(tensors["a"]), Source(tensors["b"]))
    views = [View.of(sources, number) for number in (0, 1)]
    assert [view.acts_on_packed_rows() for view in views] == [True, True]
    values = torch.cat(
        [torch.from_numpy(first), torch.from_numpy(gguf.quants.dequantize(packed, Kind.Q8_0))]
    )
    for calls in (["cat(0)"], ["cat(0)", "rope_permute(1)"], ["cat(0)", "transpose()"]):
        (made,) = follow(views, *calls)
        assert not made.acts_on_packed_rows()
        expected = halves_to_pairs(1)(values) if len(calls) > 1 and "rope" in calls[1] else values
        expected = expected.T.contiguous() if made.transposed else expected
        torch.testing.assert_close(whole(made), expected)
        check_pieces(made)


@pytest.mark.parametrize("per_expert", [False, True])
def test_scales_in_a_tensor_of_their_own(tmp_path, per_expert):
    (weight,) = some((3, 4, 64))
    factors = np.array([2.0, 3.0, 5.0] if per_expert else [0.5], np.float32)
    file = GgufFile(write_gguf(tmp_path / "a.gguf", {}, {"w": weight, "s": factors}))
    view = View.of((Source(file.tensors["w"], file.tensors["s"]),), 0)
    expected = torch.from_numpy(weight * factors.reshape(-1, 1, 1))
    torch.testing.assert_close(whole(view), expected)
    check_pieces(view)
    assert not view.acts_on_packed_rows()
    (made,) = follow([view], "transpose()")
    torch.testing.assert_close(whole(made), expected.mT.contiguous())


def test_a_big_endian_source(tmp_path):
    (weight,) = some((4, 8))
    path = write_gguf(tmp_path / "a.gguf", {}, {"w": weight}, endianess=gguf.GGUFEndian.BIG)
    view = View.of((Source(GgufFile(path).tensors["w"]),), 0)
    torch.testing.assert_close(whole(view), torch.from_numpy(weight))


def test_rows_that_lie_far_apart(tmp_path):
    """They are gathered run by run, repeated rows included."""
    views, (value,) = views_of(tmp_path / "a.gguf", some((500, 8)))
    order = np.array([499, 3, 4, 5, 0, 250, 250, 251, 4])
    made = views[0].take(0, order)
    torch.testing.assert_close(whole(made), value[order])
    check_pieces(made)


@pytest.mark.parametrize("reorder", [False, True])
def test_a_transposed_piece_takes_little_memory(tmp_path, reorder):
    views, (value,) = views_of(tmp_path / "a.gguf", some((40_000, 256)))
    (view,) = views
    if reorder:
        view = view.take(1, np.arange(256)[::-1].copy())
    made = replace(view, transposed=True)
    tracemalloc.start()
    try:
        piece = made.read(4, 8)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    expected = value.numpy()[:, [251, 250, 249, 248] if reorder else [4, 5, 6, 7]].T
    np.testing.assert_array_equal(piece, expected)
    assert peak < 16_000_000  # the tensor takes 41 MB


# --- what doesn't fit -------------------------------------------------------------------------

MISFITS = [
    ("rope_unpermute(5)", [MATRIX]),
    ("rope_unpermute(0)", [MATRIX]),
    ("rope_unpermute(-4)", [MATRIX]),
    ("rope_permute(24)", [MATRIX]),
    ("value_heads(2, 3, 5)", [MATRIX]),
    ("value_heads(-2, -3, 4)", [MATRIX]),
    ("value_heads(2, 3, 4, -1)", [MATRIX]),
    ("value_heads(2, 3, 4, 0, 2)", [MATRIX]),
    ("value_heads(2, 3, 4, 0, -3)", [MATRIX]),
    ("group_by_key_head(0)", [MATRIX]),
    ("group_by_key_head(5)", [MATRIX]),
    ("group_by_key_head(3)", [EXPERTS]),
    ("group_by_key_head(2)", [(4, 64), (4, 32)]),
    ("split_by_key_head(4, [8, 12])", [MATRIX]),
    ("split_by_key_head(4, [7, 13, 4])", [MATRIX]),
    ("split_by_key_head(0, [24])", [MATRIX]),
    ("cat(1)", [MATRIX, MATRIX]),
    ("cat(-1)", [EXPERTS, EXPERTS]),
    ("cat(0)", [(4, 64), (4, 32)]),
    ("cat(0)", [EXPERTS, (3, 4, 64)]),
    ("split(0, [20, 5])", [MATRIX]),
    ("split(0, [25, -1])", [MATRIX]),
    ("split(0, [24, 0])", [MATRIX]),
    ("split(-2, [20, 4])", [MATRIX]),
    ("split(1, [32, 31])", [MATRIX]),
    ("stack(2)", [MATRIX, MATRIX]),
    ("stack(-1)", [MATRIX, MATRIX]),
    ("stack(0)", [(4, 64), (5, 64)]),
    ("unstack(1)", [MATRIX]),
    ("unstack(-1)", [EXPERTS]),
    ("unsqueeze(2)", [MATRIX]),
    ("unsqueeze(-1)", [MATRIX]),
    ("squeeze(0)", [MATRIX]),
    ("squeeze(-1)", [(4, 1, 64)]),
    ("transpose()", [(64,)]),
    ("at(2, add(1))", [MATRIX, MATRIX]),
    ("at(-1, add(1))", [MATRIX, MATRIX]),
    ("at(1, cat(0), 2)", [MATRIX, MATRIX]),
    ("at(0, add(1), 0)", [MATRIX, MATRIX]),
    ("split(0, [24])", [MATRIX, MATRIX]),
    ("unstack(0)", [MATRIX, MATRIX]),
]


@pytest.mark.parametrize(("call", "shapes"), MISFITS)
def test_misfits(tmp_path, call, shapes):
    views, _ = views_of(tmp_path / "a.gguf", some(*shapes))
    with pytest.raises((ValueError, IndexError, ZeroDivisionError)):  # what the resolver expects
        bind(call).apply(views)


@pytest.mark.parametrize(
    "call", ["rope_permute(1)", "split(0, [8, 16])", "unstack(0)", "unsqueeze(0)", "cat(0)"]
)
def test_nothing_is_rearranged_after_a_transposition(tmp_path, call):
    views, _ = views_of(tmp_path / "a.gguf", some((24, 24)))
    with pytest.raises(ValueError):
        follow(views, "transpose()", call)


@pytest.mark.parametrize("call", ["cat(0)", "stack(0)", "group_by_key_head(2)"])
@pytest.mark.parametrize(
    "before", ["at(0, add(1))", "at(0, value_heads(2, 2, 16, 0, 1))", "at(0, transpose())"]
)
def test_unlike_tensors_are_not_joined(tmp_path, before, call):
    views, _ = views_of(tmp_path / "a.gguf", some((64, 64), (64, 64)))
    with pytest.raises(ValueError, match="can't be joined"):
        follow(views, before, call)


def test_values_without_a_logarithm(tmp_path):
    for bad in (0.0, 1.0, np.nan):
        array = np.array([[-1.0, bad]], np.float32)
        views, _ = views_of(tmp_path / "a.gguf", [array])
        with pytest.raises(ValueError, match="below zero"):
            whole(follow(views, "neg_log()")[0])


@pytest.mark.parametrize(
    "source",
    [
        "unknown()",
        "_each()",
        "_elementwise()",
        "operation()",
        "add",
        "add(-1) + 1",
        "add()",
        "add(1, 2)",
        "add(constant=1)",
        "add(*x)",
        "x.add(1)",
        "add(x.y)",
        "add(lambda: 1)",
        "at(0, 1)",
        "at(0, open('x'))",
        "at(0, add)",
        "add(1",
        "",
        "import os",
        "add(" + "-" * 900 + "1)",
        "at(0, " * 150 + "add(1)" + ")" * 150,
        "add(" + "1 + " * 400 + "1)",
    ],
)
def test_calls_that_are_refused(source):
    with pytest.raises(ExpressionError):
        OperationCall(source)


@pytest.mark.parametrize(
    "source",
    [
        "add('1')",
        "add([1])",
        "add(None)",
        "add(True)",
        "rope_unpermute(True)",
        "split(0, [True])",
        "rope_unpermute(1.5)",
        "rope_unpermute('heads')",
        "split(0, 3)",
        "split(0, ['a'])",
        "split([0], [1])",
        "value_heads(2, 2, [1])",
        "add(missing)",
        "at('0', add(1))",
    ],
)
def test_arguments_of_the_wrong_kind(source):
    call = OperationCall(source)
    with pytest.raises(ExpressionError):
        call.bind(NAMES)


def test_names_of_the_arguments():
    call = OperationCall("at(a, split(b, [c, d * e]))")
    assert call.names == {"a", "b", "c", "d", "e"}

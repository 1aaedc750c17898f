"""Every tensor of every fixture equals what a second implementation makes of the GGUF."""

import pytest
import torch

from tests.conversions import KEPT_FLOAT32, Case, cases, converted, load
from tests.oracles import inverse


@pytest.mark.parametrize("case", cases(), ids=str)
def test_equals_the_converter_undone_on_decoded_tensors(case: Case) -> None:
    expected = inverse.checkpoint(case.model, case.mmproj, case.mtp)
    written = load(converted(case))
    assert written.keys() == expected.keys()
    wrong = [name for name in expected if not equal(name, written[name], expected[name])]
    assert not wrong


def equal(name: str, written: torch.Tensor, expected: torch.Tensor) -> bool:
    dtype = torch.float32 if name.endswith(KEPT_FLOAT32) else torch.bfloat16
    if (written.dtype, written.shape) != (dtype, expected.shape):
        return False
    if name.endswith("A_log"):  # logarithms of two libraries: a unit of float32 apart, or two
        return torch.allclose(written, expected, rtol=2**-22, atol=0)
    return torch.equal(written, expected.to(dtype))

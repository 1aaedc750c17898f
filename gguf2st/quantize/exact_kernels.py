"""The inner loop of `exact`."""

from __future__ import annotations

import numpy as np

from gguf2st.jit import kernel

# How a group lies on a grid.
OFF = 0  # on none
NEAR = 1  # on one whose unit the scale's dtype can't hold
ON = 2

# A quotient this near to an integer is one: the values are products of at most 24 bits.
INTEGRAL = np.float32(1e-4)


@kernel
def _representable(value, lost_bits):
    """Whether float32 `value` has none of its lowest bits, and a normal exponent in 16 bits."""
    if lost_bits == 13 and not (np.float32(2**-14) <= abs(value) <= np.float32(65504)):
        return False
    scaled = np.empty(1, np.float32)
    scaled[0] = value
    return scaled.view(np.uint32)[0] & np.uint32((1 << lost_bits) - 1) == 0


@kernel
def _codes_of(group, unit, lowest, highest, codes):
    """Codes of a group in multiples of `unit`; False where a value is none."""
    for index in range(len(group)):
        quotient = group[index] / unit
        code = np.rint(quotient)
        if abs(quotient - code) > INTEGRAL or code < lowest or code > highest:
            return False
        codes[index] = np.uint8(np.int32(code) - np.int32(lowest))
    return True


@kernel
def fit_exactly(values, size, half, lost_bits, codes, units, found):
    """The coarsest grid of each group on which all its values lie.

    `half` is 8 or 128: codes are -half ... half - 1, stored plus half. `lost_bits` is how many
    bits of a float32 the scale's dtype lacks.
    """
    rows, columns = values.shape
    for row in range(rows):
        for number in range(columns // size):
            group = values[row, number * size : (number + 1) * size]
            out = codes[row, number * size : (number + 1) * size]
            largest = np.float32(0)
            for index in range(size):
                if abs(group[index]) > abs(largest):
                    largest = group[index]
            units[row, number], found[row, number] = np.float32(1), ON
            if largest == 0:
                out[:] = half
                continue
            found[row, number] = OFF
            near = np.float32(0)
            for count in range(1, half + 1):
                # Only the lowest code is as large as `half`, and it is negative.
                unit = (
                    -largest / np.float32(half)
                    if count == half
                    else abs(largest) / np.float32(count)
                )
                if not _codes_of(group, unit, -half, half - 1, out):
                    continue
                if _representable(unit, lost_bits):
                    units[row, number], found[row, number] = unit, ON
                    break
                if near == 0:
                    near = unit
            if found[row, number] == OFF and near != 0:
                _codes_of(group, near, -half, half - 1, out)
                units[row, number], found[row, number] = near, NEAR

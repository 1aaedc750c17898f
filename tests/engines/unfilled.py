"""Finds parameters of a loaded model that nothing was loaded into."""

from collections.abc import Callable
from typing import Any

# Parameters are filled with one of these bytes before each of two passes of loading. A byte that
# both passes leave as it was is one that nothing has been loaded into.
POISONS = (0xA5, 0x5A)
# W4AFp8 takes a static scale of activations that is 1 for one that hasn't been loaded, and without
# calibration 1 is also what a checkpoint has. So it stays 1 beforehand, and 2 is loaded.
STATIC_SCALE = "input_scale"


def find_unfilled(model: Any, load: Callable[[], None]) -> list[str]:
    """Names of parameters with a part that `load`, called twice, doesn't fill."""
    import torch

    parameters = dict(model.named_parameters())
    storage = {
        name: torch.empty(0, dtype=torch.uint8).set_(parameter.untyped_storage())
        for name, parameter in parameters.items()
    }
    untouched = {name: torch.ones_like(held, dtype=torch.bool) for name, held in storage.items()}
    for poison in POISONS:
        for name, parameter in parameters.items():
            if name.endswith(STATIC_SCALE):
                parameter.data.fill_(1)
            else:
                storage[name].fill_(poison)
        before = {name: held.clone() for name, held in storage.items()}
        load()
        for name, held in storage.items():
            untouched[name] &= held == before[name]
    found = []
    for name, bytes_ in untouched.items():
        if missing := int(bytes_.sum()) // parameters[name].element_size():
            found.append(f"{name} {missing} of {parameters[name].numel()} values")
    return found

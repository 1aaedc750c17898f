"""Lets a torchvision that was built for CUDA be imported beside a CPU build of torch.

torchvision's compiled library needs the CUDA build of torch and is quietly left out without it.
Importing the package then fails with "operator torchvision::nms does not exist", because it
describes that operator, which no one has defined. Nothing in these tests computes it: image
processors resize and normalize with plain torch operators. So the missing operators are declared
here, without an implementation, as soon as torchvision finds that its library can't be loaded.

Python imports this module at start-up when its directory is on PYTHONPATH, which the processes
that an engine starts inherit. It changes no installed file and doesn't import torch by itself.
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

OPERATORS = ("nms", "qnms")
SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def declare_missing_operators(extension: ModuleType) -> None:
    """Declare what torchvision's package describes, unless its library has defined it."""
    import torch

    missing = [name for name in OPERATORS if not hasattr(torch.ops.torchvision, name)]
    # What a library declares lasts as long as the library object.
    extension.declared_operators = library = torch.library.Library("torchvision", "FRAGMENT")
    for name in missing:
        library.define(name + SIGNATURE)


class ExtensionFinder:
    """Finds `torchvision.extension`, the module that loads the library, as usual, and adds to it."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the module's ordinary specification with a longer execution."""
        if name != "torchvision.extension":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_declare(module: ModuleType) -> None:
            execute(module)
            declare_missing_operators(module)

        spec.loader.exec_module = execute_and_declare
        return spec


sys.meta_path.insert(0, ExtensionFinder)

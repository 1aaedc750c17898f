"""What the three engines share: their tables of model classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gguf2st.engines.base import EngineModule
from gguf2st.engines.names import Mapper, ModelTable, Packed
from gguf2st.errors import UnsupportedError


class TableEngine:
    """An engine whose model classes are written down in `models`."""

    name: str
    title: str
    models: Mapping[str, ModelTable]

    def model_classes(self) -> Sequence[str]:
        """Model classes whose layers are known."""
        return list(self.models)

    def module_names(
        self, model_class: str, names: Sequence[str]
    ) -> dict[str, EngineModule | None]:
        """See `Engine`."""
        return self.table(model_class).modules(names)

    def table(self, model_class: str) -> ModelTable:
        """The class's table. Raises `UnsupportedError`."""
        if model_class not in self.models:
            raise UnsupportedError(
                f"how {self.title} names the layers of {model_class} isn't known here; "
                f"it is known for {', '.join(self.models)}."
            )
        return self.models[model_class]

    def _packed(self, model_class: str, module: EngineModule) -> Packed:
        table = self.table(model_class)
        return table.drafter_packed if module.drafter else table.packed

    def _mapper(self, model_class: str, module: EngineModule) -> Mapper:
        # The drafters' classes have no mapper.
        return Mapper() if module.drafter else self.table(model_class).mapper

"""Every GGUF block type: its number, its layout in the file, its decoder."""

from gguf2st.gguf.blocks.base import BlockType
from gguf2st.gguf.blocks.packed import PackedRows
from gguf2st.gguf.blocks.registry import block_type, block_type_by_name, known_block_types
from gguf2st.gguf.blocks.rows import decode_rounded, decode_rows, values_rows
from gguf2st.gguf.blocks.tensors import decode_on_device

__all__ = [
    "BlockType",
    "PackedRows",
    "block_type",
    "block_type_by_name",
    "decode_on_device",
    "decode_rounded",
    "decode_rows",
    "known_block_types",
    "values_rows",
]

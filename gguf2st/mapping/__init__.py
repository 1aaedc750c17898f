"""What a tensor is called, and how what llama.cpp's converter did is undone."""

from gguf2st.mapping.loading import TableError, load_table, load_tables
from gguf2st.mapping.recipe import Recipe
from gguf2st.mapping.resolve import Dropped, Resolution, find_table, resolve
from gguf2st.mapping.table import Table

__all__ = [
    "Dropped",
    "Recipe",
    "Resolution",
    "Table",
    "TableError",
    "find_table",
    "load_table",
    "load_tables",
    "resolve",
]

"""`python -m gguf2st.cli`."""

from gguf2st.cli import main

main()

"""What a Hugging Face directory holds."""

"""Reading and writing dataset files."""

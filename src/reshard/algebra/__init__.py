"""The index algebra and the nouns that it is about; nothing here opens a file."""

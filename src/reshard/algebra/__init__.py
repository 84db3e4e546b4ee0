"""The index algebra and the types that it works on; nothing here opens a file."""

"""Ask a language model about facts: what is sent is redacted, and what it answers is checked before it is shown."""

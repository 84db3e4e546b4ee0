"""Which release of common packages added, moved or removed a name, a parameter or an attribute."""

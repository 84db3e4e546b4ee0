"""Which release of the field's packages brought, moved or dropped a name, a parameter or an attribute."""

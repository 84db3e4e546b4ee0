"""What each release of the field's packages offers, read from its archive: `python -m tools.api_history`."""

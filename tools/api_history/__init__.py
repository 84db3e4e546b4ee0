"""The API of each release of common packages, read from its archive: `python -m tools.api_history`."""

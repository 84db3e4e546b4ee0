"""A module lacks a name that the code expects."""

import accelerate

accelerate.utils.NoSuchConfig()

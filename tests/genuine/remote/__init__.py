"""Models whose code is on the Hub, in small: the classes, configs and names that their peers rely on.

Towers are one layer each. They are copied whole, under whatever names they have, so nothing depends on the rest.
"""

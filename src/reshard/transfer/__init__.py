"""Move bytes: execute a plan in bounded memory, from files that must not change to a folder that appears complete.

No module here knows a format or a family.
"""

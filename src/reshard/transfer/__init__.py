"""What moves bytes: a plan carried out in bounded memory, from files that do not change to a folder that appears whole.

No module here knows a format or a family.
"""

"""Commands with the arguments of other tools' conversion scripts: only the name of the script changes.

Each is a module of the script's name, run with `python -m reshard.dropins.NAME`. It maps the script's arguments to one
call of `convert` or `verify`.
"""

"""Python's own messages, by the exception that they belong to: people, loggers and lazy imports omit its name."""

import re

_MESSAGES = {
    "TypeError": re.compile(
        r"(?:[\w.]{1,200}\(\) ?)?(?:got an )?unexpected keyword argument ?['\"`]"
        r"|takes \d+ positional arguments? but \d+|unsupported operand type"
    ),
    "AttributeError": re.compile(
        r"(?:module |type object )?['\"`][\w.]{1,100}['\"`](?: object)? has no attribute ['\"`]"
    ),
    "ImportError": re.compile(
        r"cannot import name ['\"`]"
        r"|(?<![\w./+@-])[\w./+@-]{1,300}\.so\S{0,40}: (?:undefined symbol: \w|cannot open shared)"
    ),
    "ModuleNotFoundError": re.compile(r"No module named ['\"`]"),
    "FileNotFoundError": re.compile(r"\[Errno 2\] No such file or directory: "),
    "NameError": re.compile(r"(?<!\w)name ['‘`][A-Za-z_]\w*['’`] is not defined"),
    "AssertionError": re.compile(
        r"(?<![A-Za-z0-9_])assert [\w.\[\]'\"()]{1,80} (?:is(?: not)?|==|!=|<=?|>=?|(?:not )?in) [\w.'\"\[\]()]{1,60}"
    ),
}
_JOINED = re.compile(r"(\(\)(?=got )|keyword argument(?=['\"`]))")
"""Where people leave out a space."""


def message_kind(message: str) -> str:
    """The exception of Python that has a message; "" if it is not one of Python's."""
    return next((name for name, pattern in _MESSAGES.items() if pattern.match(message)), "")


def message_in(text: str) -> tuple[str, str] | None:
    """The exception and the message of Python that begins in a text; None if there is none."""
    for name, pattern in _MESSAGES.items():
        if match := pattern.search(text):
            return name, _JOINED.sub(r"\1 ", text[match.start() :].strip())
    return None

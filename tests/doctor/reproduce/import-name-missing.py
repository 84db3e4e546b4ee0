"""Two packages do not fit each other."""

from accelerate.utils import no_such_helper  # noqa: F401

"""A package cannot be imported by this interpreter."""

import no_such_package_is_installed  # noqa: F401

"""The model brings its own code and nobody allowed it."""

from small import CURED, load, remote_code

load(remote_code(), trust_remote_code=CURED)

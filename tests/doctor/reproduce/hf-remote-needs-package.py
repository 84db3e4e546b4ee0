"""Remote code wants a package that is not installed."""

from small import load, remote_code

load(remote_code(imports="import transformers_stream_generator"), trust_remote_code=True)

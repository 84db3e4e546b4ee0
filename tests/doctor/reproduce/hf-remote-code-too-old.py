"""Remote modeling code imports what this transformers no longer has."""

from small import load, remote_code

REMOVED = "from transformers.pytorch_utils import find_pruneable_heads_and_indices"
load(remote_code(imports=REMOVED), trust_remote_code=True)

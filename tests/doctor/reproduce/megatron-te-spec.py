"""TransformerEngine and local layer names are mixed up."""

from mcore import QWEN2, build, start
from small import CURED

from tests.genuine import fake_te

fake_te.install()  # megatron-core's real spec over a stand-in for TransformerEngine, which needs a GPU
start()
saved = build(QWEN2, spec="te").state_dict()
build(QWEN2, spec="te" if CURED else "local").load_state_dict(saved)

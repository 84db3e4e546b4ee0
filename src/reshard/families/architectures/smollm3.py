"""SmolLM3: Llama with no rotary embedding in every fourth layer."""

from reshard.families.architectures.llama import dense
from reshard.families.config_entries import Biases, FullAttention
from reshard.families.config_map import DERIVED_HEADS, NO_QK_NORM, TIED
from reshard.families.dialects import gguf, nanotron
from reshard.families.family import MCORE, Family
from reshard.families.rope import Rope, RopeLayers

SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    dense,
    (
        *DERIVED_HEADS,
        Rope(default_theta=2000000.0),
        RopeLayers(),
        FullAttention(late=False),
        TIED,
        Biases("attention_bias", "mlp_bias"),
        NO_QK_NORM,
    ),
    dialects={**gguf.LLAMA, **nanotron.DIALECTS},
    judged=(MCORE,),
)

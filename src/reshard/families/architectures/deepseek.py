"""DeepSeek-MoE: Llama's attention with the experts of DeepSeek-V2."""

from reshard.families.architectures import glm4_moe
from reshard.families.config_entries import Const
from reshard.families.config_map import (
    DEEPSEEK_EXPERTS,
    GROUPED_HEADS,
    NO_BIAS,
    NO_QK_NORM,
    NORM_TOPK,
    SOFTMAX_ROUTER,
)
from reshard.families.family import MCORE_BRIDGE, Family
from reshard.families.rope import Rope

# Its router computes the same as Megatron-Core's; no implementation of the model is available to compare logits.
DEEPSEEK = Family(
    "deepseek",
    "DeepseekForCausalLM",
    glm4_moe.rules,
    (
        *GROUPED_HEADS,
        Rope(),
        NO_BIAS,
        Const(config={"attention_bias": False, "moe_layer_freq": 1}, computed={"scoring_func": "softmax"}),
        NO_QK_NORM,
        *DEEPSEEK_EXPERTS,
        SOFTMAX_ROUTER,
        NORM_TOPK,
    ),
    judged=(MCORE_BRIDGE,),
    precedence=-1,  # Megatron-Core's tensors also match other families
)

"""DeepSeek-V2: DeepSeek-V3's layers with a softmax router, without a router bias and without MTP layers."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.families.architectures.deepseek_v3 import rules
from reshard.families.config_entries import Args, Config, Const, RouterGroups, Values
from reshard.families.config_map import DEEPSEEK_EXPERTS, LATENT_ATTENTION, SOFTMAX_ROUTER
from reshard.families.dialects import maxtext, torchtitan
from reshard.families.family import MCORE, MCORE_BRIDGE, MEGATRON_BRIDGE, Family
from reshard.families.transformers_5 import MemoryNames


class GroupLimited(RouterGroups):
    """`topk_method` decides whether routing is limited to groups; a group is scored by its best expert."""

    best = 1

    def to_args(self, config: Config) -> Values:
        return super().to_args(self._effective(config))

    def to_config(self, args: Args) -> Values:
        method = "group_limited_greedy" if args.get("moe_router_group_topk") else "greedy"
        return {"topk_method": method, **super().to_config(args)}

    def differs(self, config: Config) -> Iterator[tuple[str, str]]:
        yield from super().differs(self._effective(config))

    def _effective(self, config: Config) -> Config:
        return config if config.get("topk_method") == "group_limited_greedy" else {}


DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    rules,
    (
        *LATENT_ATTENTION,
        *DEEPSEEK_EXPERTS,
        SOFTMAX_ROUTER,
        # A softmax over all experts whose scores are not renormalised: transformers ignores norm_topk_prob.
        Const(
            args={"moe_router_pre_softmax": True},
            config={
                "scoring_func": "softmax",
                "norm_topk_prob": False,
                "mlp_bias": False,
                "moe_layer_freq": 1,
            },
        ),
        GroupLimited(),
    ),
    dialects={torchtitan.TORCHTITAN.name: torchtitan.deepseek, **maxtext.DEEPSEEK},
    live=MemoryNames(),
    precedence=2,  # above DeepSeek-V3: if nothing names the family, a router without a bias means V2
    judged=(MCORE, MCORE_BRIDGE, MEGATRON_BRIDGE),
)

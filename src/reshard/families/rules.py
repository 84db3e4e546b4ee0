"""Rules, with which families are declared, and blocks of rules that many of them share.

A rule expresses one Hugging Face tensor as a view over the tensors of Megatron-Core. Names contain
`{layer}` and `{expert}`. A block (attention, MLP, mixture of experts …) is a list of rules whose names are
relative to a layer; `decoder` adds the layer prefix. Nothing here knows about files, ranks or directions.

Megatron-Core's names are those of its local layer spec with global layer and expert indices
(`decoder.layers.7.mlp.experts.3.linear_fc1.weight`); each format translates them to its own spelling.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from reshard.algebra.views import View, concat


class Native(NamedTuple):
    """A Megatron-Core tensor: its name (with placeholders) and its complete, unsharded shape."""

    name: str
    shape: tuple[int, ...]


class Step(NamedTuple):
    """What is done to each element: `plus` is added, or it is multiplied by `times`, or divided by `over`.

    A sum is computed in float64, or, if `in_torch`, as torch does: float16 in float16, everything else in float32.
    """

    plus: float = 0.0
    times: float = 1.0
    over: float = 1.0
    in_torch: bool = False


class ReversibleStep(NamedTuple):
    """The step from a view to a tensor, and the step `back`.

    If `rounds`, the engine itself stores rounded results, so that nothing else is expected.
    """

    step: Step
    back: Step
    rounds: bool = False

    @property
    def reversed(self) -> ReversibleStep:
        """The change of the other side."""
        return ReversibleStep(self.back, self.step, self.rounds)


def plus(number: float, *, rounds: bool = False) -> ReversibleStep:
    """A number is added, and subtracted on the other side."""
    return ReversibleStep(Step(plus=number), Step(plus=-number), rounds)


@dataclass(frozen=True, slots=True)
class Rule:
    """The tensor named `hf` is `view` (over `Native` sources) after `change`, for each of `layers` and `experts`.

    A `copy` repeats elements of another rule (tied heads, an embedding stored twice):
    it is checked against the original and is never a source itself. `written` tells whether the Hub's
    checkpoints store that copy. A rule with a `reason` drops its elements; if it has a Hugging Face name, the Hub may
    have a tensor for them, which is dropped, too. If it `repeats`, `view` is another place where an engine stores the
    elements of the rule with the same name: they are written there as well, and must be equal.
    """

    hf: str
    view: View
    layers: Sequence[int] = ()
    experts: int = 0
    copy: bool = False
    written: bool = True
    reason: str = ""
    change: ReversibleStep | None = None
    repeats: bool = False


Block = list[Rule]

NEVER_READ = "what no layer reads"
"""The reason to drop a tensor of an engine whatever its values are."""


def native(name: str, *shape: int) -> View:
    """A complete Megatron-Core tensor, for a rule to split and slice."""
    return View.of(Native(name, shape), *shape)


def same(hf: str, mcore: str, *shape: int) -> Rule:
    """One tensor with two names."""
    return Rule(hf, native(mcore, *shape))


MAX_NUMBER = 1 << 31
MOST_MODULES = 1 << 18
"""Limit on the experts of all layers: more than ten times those of the largest models."""


LAYER_PATTERN = "hybrid_layer_pattern"
"""The argument that makes the model a HybridModel, whose layers are of several kinds."""


N_GRAMS = (
    *("ple_embed_dim", "ple_conv_kernel_size", "ngram_size", "heads_per_ngram"),
    *("ngram_vocab_size_base", "make_ngram_vocab_size_divisible_by", "split_ngram_parts"),
)
"""Arguments of mcore-bridge from which the sizes of n-gram embeddings follow."""


def layer_pattern(args: Mapping[str, Any]) -> str:
    """The kinds of layers of a HybridModel, until 0.16 called MambaModel; empty for GPTModel."""
    return str(args.get(LAYER_PATTERN) or args.get("hybrid_override_pattern") or "")


@dataclass(frozen=True, slots=True)
class Dims:
    """The sizes of a model, from Megatron-LM's argument names (see `from_args`)."""

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    vocab: int
    padded_vocab: int
    tied: bool
    qkv_bias: bool
    output_bias: bool
    bias: bool
    qk_norm: bool
    experts: int
    expert_ffn: int
    shared_ffn: int
    shared_gate: bool
    router_bias: bool
    sparse: tuple[int, ...]
    q_lora: int
    kv_lora: int
    qk_nope: int
    qk_rope: int
    v_head: int
    index_heads: int
    index_dim: int
    indexed: tuple[int, ...]
    pattern: tuple[int, ...]
    mamba: tuple[int, ...]
    mtp: int
    output_gate: bool
    delta: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    rope_scaled: bool
    windowed: tuple[int, ...]
    global_head_dim: int
    global_groups: int
    keys_are_values: bool
    sharing: int
    wide_sharing: bool
    layer_dim: int
    layer_vocab: int
    topk: int
    hashed: int
    ratios: tuple[int, ...]
    streams: int
    output_groups: int
    output_lora: int
    window_groups: int
    window_heads: int
    value_head: int
    lightning: tuple[int, ...]
    stream_rank: int
    ngrams: tuple[int, ...]
    ngram_layers: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raise ValueError for impossible sizes: rules loop over some sizes, and multiply others."""
        for name in self.__slots__:
            value = getattr(self, name)
            if not all(
                isinstance(n, int) and 0 <= n < MAX_NUMBER
                for n in (value if isinstance(value, tuple) else [value])
            ):
                raise ValueError(f"{name} is {reprlib.repr(value)}")
        for name in ("heads", "groups"):  # both are divisors
            if not getattr(self, name):
                raise ValueError(f"{name} is 0")
        if (self.layers + self.mtp) * max(1, self.experts) > MOST_MODULES:
            raise ValueError(f"{self.layers} layers, {self.mtp} MTP layers and {self.experts} experts")

    @property
    def qkv_rows(self) -> int:
        """The rows of linear_qkv: queries, each with its optional gate, keys and values."""
        queries = self.heads * (1 + self.output_gate) * self.head_dim
        return queries + self.groups * (self.head_dim + (self.value_head or self.head_dim))

    @staticmethod
    def from_args(args: Mapping[str, Any], vocab: int, padded_vocab: int | None = None) -> Dims:
        """Read sizes from Megatron-LM `args`; `vocab` counts real tokens, `padded_vocab` embedding rows."""

        def get(name: str, default: Any = 0) -> Any:
            value = args.get(name)
            return default if value is None else value

        def latent(name: str) -> int:
            """A size of latent attention. Megatron-LM stores its defaults in every model's arguments."""
            return int(get(name)) if get("multi_latent_attention") else 0

        def linear(name: str) -> int:
            """A size of linear attention. Megatron-LM stores its defaults in every model's arguments."""
            return int(get(name)) if get("experimental_attention_variant") == "gated_delta_net" else 0

        heads, hidden, layers = args["num_attention_heads"], args["hidden_size"], args["num_layers"]
        grouped = get("group_query_attention", True)
        experts = get("num_experts")
        ffn = args["ffn_hidden_size"]
        global_head_dim = get("global_kv_channels", get("global_head_dim"))
        return Dims(
            layers=layers,
            hidden=hidden,
            heads=heads,
            groups=get("num_query_groups", heads) if grouped else heads,
            head_dim=get("kv_channels", hidden // heads),
            ffn=ffn,
            vocab=vocab,
            padded_vocab=padded_vocab or vocab,
            tied=not get("untie_embeddings_and_output_weights", False),
            qkv_bias=bool(
                get("linear_qkv_bias", get("add_qkv_bias", False) or get("add_bias_linear", False))
            ),
            output_bias=bool(get("linear_proj_bias", get("add_bias_linear", False))),
            bias=bool(get("add_bias_linear", False)),
            qk_norm=bool(get("qk_layernorm", False)),
            experts=experts,
            expert_ffn=get("moe_ffn_hidden_size", ffn),
            shared_ffn=get("moe_shared_expert_intermediate_size"),
            shared_gate=bool(get("moe_shared_expert_gate", False)),
            router_bias=bool(get("moe_router_enable_expert_bias", False)),
            sparse=sparse_layers(get("moe_layer_freq", 1), layers) if experts else (),
            q_lora=latent("q_lora_rank"),
            kv_lora=latent("kv_lora_rank"),
            qk_nope=latent("qk_head_dim"),
            qk_rope=latent("qk_pos_emb_head_dim"),
            v_head=latent("v_head_dim"),
            index_heads=get("index_n_heads", get("dsa_indexer_n_heads", get("indexer_n_heads"))),
            index_dim=get("index_head_dim", get("dsa_indexer_head_dim", get("indexer_head_dim"))),
            indexed=indexed_layers(
                get("dsa_indexer_topk_freq", 1), get("dsa_indexer_skip_topk_offset"), layers
            )
            if args.get("lightning_indexer_layers") is None
            else tuple(args["lightning_indexer_layers"]),
            pattern=tuple(map(ord, layer_pattern(args).replace("|", ""))),
            mamba=tuple(
                get(f"mamba_{size}") for size in ("num_heads", "head_dim", "num_groups", "state_dim")
            ),
            mtp=get("mtp_num_layers"),
            output_gate=bool(get("attention_output_gate", False)),
            delta=delta_layers(args, layers),
            key_heads=linear("linear_num_key_heads"),
            value_heads=linear("linear_num_value_heads"),
            key_dim=linear("linear_key_head_dim"),
            value_dim=linear("linear_value_head_dim"),
            kernel=linear("linear_conv_kernel_dim"),
            rope_scaled=bool(get("use_rope_scaling", False)),
            windowed=windowed_layers(args, layers) if global_head_dim else window_pattern(args),
            global_head_dim=global_head_dim,
            global_groups=get("num_global_query_groups", get("num_global_key_value_heads")),
            keys_are_values=bool(get("attention_k_eq_v", False)),
            sharing=get("num_kv_shared_layers"),
            wide_sharing=bool(get("use_double_wide_mlp", False)),
            layer_dim=get("per_layer_embed_dim"),
            layer_vocab=get("per_layer_embed_vocab_size"),
            topk=get("moe_router_topk"),
            hashed=get("moe_n_hash_layers"),
            ratios=tuple(get("csa_compress_ratios", ())),
            streams=get("num_residual_streams", get("hc_count")),
            output_groups=get("o_groups"),
            output_lora=get("o_lora_rank"),
            window_groups=get("swa_num_query_groups"),
            window_heads=get("swa_num_attention_heads"),
            lightning=lightning_layers(get("layer_group_size"), layers),
            value_head=get("v_head_dim") if get("hybrid_attention_pattern") else 0,
            stream_rank=get("hc_lowrank"),
            ngrams=tuple(map(get, N_GRAMS)),
            ngram_layers=tuple(get("ple_layer_ids", ())),
        )


def sparse_layers(freq: int | Sequence[int], layers: int) -> tuple[int, ...]:
    """Which layers are mixtures of experts, by Megatron-LM's `--moe-layer-freq`."""
    if isinstance(freq, int):
        return tuple(layer for layer in range(min(layers, MOST_MODULES)) if layer % freq == 0)
    return tuple(layer for layer, is_sparse in enumerate(freq) if is_sparse)


def indexed_layers(freq: int, offset: int, layers: int) -> tuple[int, ...]:
    """Which layers have their own indexer for sparse attention; the others reuse the selection of a layer before."""
    return tuple(i for i in range(min(layers, MOST_MODULES)) if max(i - offset + 1, 0) % freq == 0)


def lightning_layers(group: int, layers: int) -> tuple[int, ...]:
    """Which layers have linear attention if the last of each complete `group`, and those after the groups, have not."""
    grouped = min(layers, MOST_MODULES) // group * group if group else 0
    return tuple(layer for layer in range(grouped) if (layer + 1) % group)


def window_pattern(args: Mapping[str, Any]) -> tuple[int, ...]:
    """Which layers have a window in Megatron-Bridge's list of numbers for MiMo-V2-Flash."""
    return tuple(layer for layer, each in enumerate(args.get("hybrid_attention_pattern") or ()) if each)


def delta_layers(args: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Which layers are gated delta nets, by Megatron-LM's `--linear-attention-freq`; the others have full attention."""
    freq = args.get("linear_attention_freq")
    if args.get("experimental_attention_variant") != "gated_delta_net" or freq is None:
        return ()
    if isinstance(freq, int):
        return tuple(layer for layer in range(min(layers, MOST_MODULES)) if (layer + 1) % freq)
    return tuple(layer for layer, is_linear in enumerate(freq) if is_linear)


def windowed_layers(args: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Which layers attend to a window, by `--window-attn-skip-freq` or Megatron-Bridge's `interleaved_attn_pattern`."""
    skip, pattern = args.get("window_attn_skip_freq"), args.get("interleaved_attn_pattern")
    if isinstance(pattern, list | tuple):
        skip = sum(each for each in pattern if isinstance(each, int))
    if isinstance(skip, list | tuple):
        return tuple(layer for layer, is_windowed in enumerate(skip) if is_windowed)
    every = skip if isinstance(skip, int) and skip > 0 else MAX_NUMBER
    return tuple(layer for layer in range(min(layers, MOST_MODULES)) if (layer + 1) % every)


def ends(dims: Dims) -> Iterator[Rule]:
    """Embedding, final norm and head. Rows beyond the vocabulary are padding on Megatron's side."""
    names = ("embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight")
    embedding, head, norm, *padding = outer_rules(dims, *names, rows=dims.padded_vocab)
    yield from (embedding, norm, head, *padding)


def outer_rules(
    dims: Dims,
    embedding: str,
    head: str,
    norm: str,
    *,
    rows: int | None = None,
    change: ReversibleStep | None = None,
) -> Block:
    """Embedding, head and final norm by their names on the other side, and the padding of tables of `rows` rows.

    `change` is that of the embedding.
    """
    rows = rows or dims.vocab
    table = native(embedding, rows, dims.hidden)
    own = table if dims.tied else native(head, rows, dims.hidden)
    rules = [
        Rule("model.embed_tokens.weight", table[: dims.vocab], change=change),
        Rule("lm_head.weight", own[: dims.vocab], copy=dims.tied, written=not dims.tied),
        same("model.norm.weight", norm, dims.hidden),
    ]
    if rows > dims.vocab:
        rules.append(Rule("", table[dims.vocab :], reason="vocabulary padding", change=change))
        if not dims.tied:
            rules.append(Rule("", own[dims.vocab :], reason="vocabulary padding"))
    return rules


def norms(dims: Dims) -> Block:
    """The two norms of a pre-norm layer."""
    return [
        same("input_layernorm.weight", "input_layernorm.weight", dims.hidden),
        same("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", dims.hidden),
    ]


def attention(dims: Dims, fused: str = "", *, norms_of_all_heads: str = "", gates_last: bool = True) -> Block:
    """Grouped-query attention. linear_qkv stores query heads, key and value, group by group.

    On the Hub they are three projections, or one called `fused` that stacks all queries, all keys and all values by
    rows.
    Queries and keys are normalised per head, or over all heads at once by modules of a bridge, whose names end in
    `norms_of_all_heads`. If the output is gated, `q_proj` stores each query before its gate; within a group, all
    queries come before all gates, or each query before its gate if not `gates_last`.
    """
    queries = dims.heads // dims.groups
    own = queries * (1 + dims.output_gate) * dims.head_dim
    grouped = (dims.groups, dims.qkv_rows // dims.groups)

    def projections(kind: str, view: View, *inner: int) -> Block:
        query, rest = view[:, :own], view[:, own:]
        if dims.output_gate and gates_last:
            order = range(3, 3 + 1 + len(inner))
            query = query.split(1, 2, queries, dims.head_dim).permute(0, 2, 1, *order)
        query = query.reshape(dims.groups * own, *inner)
        key, value = rest[:, : dims.head_dim].merge(0), rest[:, dims.head_dim :].merge(0)
        if fused:
            return [Rule(f"self_attn.{fused}.{kind}", concat([query, key, value]))]
        return [
            Rule(f"self_attn.q_proj.{kind}", query),
            Rule(f"self_attn.k_proj.{kind}", key),
            Rule(f"self_attn.v_proj.{kind}", value),
        ]

    weight = native("self_attention.linear_qkv.weight", dims.qkv_rows, dims.hidden).split(0, *grouped)
    rules = projections("weight", weight, dims.hidden)
    rules.append(
        same(
            "self_attn.o_proj.weight",
            "self_attention.linear_proj.weight",
            dims.hidden,
            dims.heads * (dims.value_head or dims.head_dim),
        )
    )
    if dims.qkv_bias:
        rules += projections(
            "bias", native("self_attention.linear_qkv.bias", dims.qkv_rows).split(0, *grouped)
        )
    if dims.output_bias:
        rules.append(same("self_attn.o_proj.bias", "self_attention.linear_proj.bias", dims.hidden))
    if dims.qk_norm:
        for name, heads in (("q", dims.heads), ("k", dims.groups)):
            module = f"self_attention.{name}_{norms_of_all_heads or 'layernorm'}"
            size = dims.head_dim * (heads if norms_of_all_heads else 1)
            rules.append(same(f"self_attn.{name}_norm.weight", f"{module}.weight", size))
    return rules


def latent_attention(dims: Dims) -> Block:
    """Multi-head latent attention (DeepSeek), with or without a low-rank query."""
    hf, mc = "self_attn.", "self_attention."
    queries = dims.heads * (dims.qk_nope + dims.qk_rope)
    rules = [
        same(
            f"{hf}kv_a_proj_with_mqa.weight",
            f"{mc}linear_kv_down_proj.weight",
            dims.kv_lora + dims.qk_rope,
            dims.hidden,
        ),
        same(f"{hf}kv_a_layernorm.weight", f"{mc}kv_layernorm.weight", dims.kv_lora),
        same(
            f"{hf}kv_b_proj.weight",
            f"{mc}linear_kv_up_proj.weight",
            dims.heads * (dims.qk_nope + dims.v_head),
            dims.kv_lora,
        ),
        same(f"{hf}o_proj.weight", f"{mc}linear_proj.weight", dims.hidden, dims.heads * dims.v_head),
    ]
    if not dims.q_lora:
        return [*rules, same(f"{hf}q_proj.weight", f"{mc}linear_q_proj.weight", queries, dims.hidden)]
    return [
        *rules,
        same(f"{hf}q_a_proj.weight", f"{mc}linear_q_down_proj.weight", dims.q_lora, dims.hidden),
        same(f"{hf}q_a_layernorm.weight", f"{mc}q_layernorm.weight", dims.q_lora),
        same(f"{hf}q_b_proj.weight", f"{mc}linear_q_up_proj.weight", queries, dims.q_lora),
    ]


GATED = ("gate_proj", "up_proj", "down_proj")


def gated_mlp(
    dims: Dims,
    ffn: int,
    hf: str = "mlp",
    mcore: str = "mlp",
    names: tuple[str, str, str] = GATED,
    bias: bool = False,
) -> Block:
    """A gated MLP: linear_fc1 is the gate above the up projection."""
    gate, up, down = names
    fc1 = native(f"{mcore}.linear_fc1.weight", 2 * ffn, dims.hidden)
    rules = [
        Rule(f"{hf}.{gate}.weight", fc1[:ffn]),
        Rule(f"{hf}.{up}.weight", fc1[ffn:]),
        same(f"{hf}.{down}.weight", f"{mcore}.linear_fc2.weight", dims.hidden, ffn),
    ]
    if bias:
        fc1 = native(f"{mcore}.linear_fc1.bias", 2 * ffn)
        rules.append(Rule(f"{hf}.{gate}.bias", fc1[:ffn]))
        rules.append(Rule(f"{hf}.{up}.bias", fc1[ffn:]))
        rules.append(same(f"{hf}.{down}.bias", f"{mcore}.linear_fc2.bias", dims.hidden))
    return rules


def mlp(dims: Dims) -> Block:
    """The MLP of a dense layer."""
    return gated_mlp(dims, dims.ffn, bias=dims.bias)


def fused_mlp(dims: Dims) -> Block:
    """The MLP of a dense layer with gate and up fused on the Hub, in the order of linear_fc1."""
    return [
        same("mlp.gate_up_proj.weight", "mlp.linear_fc1.weight", 2 * dims.ffn, dims.hidden),
        same("mlp.down_proj.weight", "mlp.linear_fc2.weight", dims.hidden, dims.ffn),
    ]


def moe(
    dims: Dims, hf: str = "mlp", names: tuple[str, str, str] = GATED, shared: str = "shared_experts"
) -> Block:
    """A mixture of experts: router, experts, and a shared expert if the model has one."""
    experts = gated_mlp(dims, dims.expert_ffn, f"{hf}.experts.{{expert}}", "mlp.experts.{expert}", names)
    rules = [
        same(f"{hf}.gate.weight", "mlp.router.weight", dims.experts, dims.hidden),
        *(replace(rule, experts=dims.experts) for rule in experts),
    ]
    if dims.router_bias:
        rules.append(same(f"{hf}.gate.e_score_correction_bias", "mlp.router.expert_bias", dims.experts))
    if dims.shared_ffn:
        rules += gated_mlp(dims, dims.shared_ffn, f"{hf}.{shared}", "mlp.shared_experts")
    if dims.shared_gate:
        rules.append(same(f"{hf}.{shared}_gate.weight", "mlp.shared_experts.gate_weight", 1, dims.hidden))
    return rules


def stacked(hf: str, mcore: str, experts: int, shape: Sequence[int], one: Callable[[View], View]) -> Rule:
    """One stacked hub tensor [experts, …] of a tensor of `shape` that every expert has, each transformed by `one`."""
    each = (one(native(f"mlp.experts.{expert}.{mcore}", *shape)) for expert in range(experts))
    return Rule(f"mlp.experts.{hf}", concat([view.reshape(1, *view.shape) for view in each]))


def stacked_experts(dims: Dims, *, transposed: bool = True) -> Block:
    """Gated experts in two tensors, gate above up: [experts, inputs, outputs], or [experts, outputs, inputs]."""

    def one(view: View) -> View:
        return view.permute(1, 0) if transposed else view

    return [
        stacked("gate_up_proj", "linear_fc1.weight", dims.experts, (2 * dims.expert_ffn, dims.hidden), one),
        stacked("down_proj", "linear_fc2.weight", dims.experts, (dims.hidden, dims.expert_ffn), one),
    ]


def under(hf: str, mcore: str, block: Iterable[Rule], layers: Sequence[int] = ()) -> Iterator[Rule]:
    """Add a prefix to both sides of a block, once or for each of `layers`."""

    def below(source: Any) -> Native:
        return Native(f"{mcore}.{source.name}", source.shape)

    for rule in block:
        yield replace(rule, hf=f"{hf}.{rule.hf}", view=rule.view.renamed(below), layers=layers)


def renamed(rules: Iterable[Rule], names: Mapping[str, str]) -> Iterator[Rule]:
    """The same tensors with other parts of names on the Hub: each key of `names` is replaced by its value, once.

    A key that a name does not contain leaves it unchanged.
    """
    for rule in rules:
        yield replace(rule, hf=_replaced(rule.hf, names))


def natively_renamed(rules: Iterable[Rule], names: Mapping[str, str]) -> Iterator[Rule]:
    """The same for parts of the native names."""

    def named(source: Any) -> Native:
        return Native(_replaced(source.name, names), source.shape)

    for rule in rules:
        yield replace(rule, view=rule.view.renamed(named))


def _replaced(name: str, parts: Mapping[str, str]) -> str:
    for part, other in parts.items():
        name = name.replace(part, other, 1)
    return name


def decoder(dims: Dims, dense: Block, sparse: Block | None = None) -> Iterator[Rule]:
    """All decoder layers: `sparse` for layers with experts, `dense` for the others."""
    if sparse is not None and not dims.experts:
        raise ValueError("the family has experts, and the sizes have none")
    return layer_rules(dims, "decoder.layers.{layer}", dense, sparse or ())


def by_kind(kinds: Sequence[tuple[Any, ...]], block: Callable[..., Iterable[Rule]]) -> Iterator[Rule]:
    """All decoder layers, of several `kinds`: `block` makes the rules of a layer of its kind."""
    for kind in dict.fromkeys(kinds):
        layers = [number for number, each in enumerate(kinds) if each == kind]
        yield from under("model.layers.{layer}", "decoder.layers.{layer}", block(*kind), layers)


def layer_rules(dims: Dims, own: str, dense: Block, sparse: Sequence[Rule] = ()) -> Iterator[Rule]:
    """The same for layers that the other side calls `own`; nothing is checked."""
    plain = tuple(layer for layer in range(dims.layers) if layer not in dims.sparse)
    for block, layers in ((dense, plain), (sparse, dims.sparse)):
        if layers:
            yield from under("model.layers.{layer}", own, block, layers)


def multi_token_prediction(dims: Dims, block: Block, *, copies: bool = True) -> Iterator[Rule]:
    """MTP layers: the Hub stores them after the last layer, most families with `copies` of embedding and head."""
    table = native("embedding.word_embeddings.weight", dims.padded_vocab, dims.hidden)
    head = table if dims.tied else native("output_layer.weight", dims.padded_vocab, dims.hidden)
    for index in range(dims.mtp):
        hf, mcore = f"model.layers.{dims.layers + index}", f"mtp.layers.{index}"
        yield from under(hf, f"{mcore}.transformer_layer", block)
        yield same(f"{hf}.enorm.weight", f"{mcore}.enorm.weight", dims.hidden)
        yield same(f"{hf}.hnorm.weight", f"{mcore}.hnorm.weight", dims.hidden)
        yield same(f"{hf}.eh_proj.weight", f"{mcore}.eh_proj.weight", dims.hidden, 2 * dims.hidden)
        yield same(f"{hf}.shared_head.norm.weight", f"{mcore}.final_layernorm.weight", dims.hidden)
        yield Rule(f"{hf}.embed_tokens.weight", table[: dims.vocab], copy=True, written=copies)
        yield Rule(f"{hf}.shared_head.head.weight", head[: dims.vocab], copy=True, written=copies)

"""Rules, with which families are declared, and blocks of rules that many of them share.

A rule expresses one Hugging Face tensor as a view over the tensors of Megatron-Core. Names contain
`{layer}` and `{expert}`. A block (attention, MLP, mixture of experts …) is a list of rules whose names are
relative to a layer; `decoder` adds the layer prefix. Nothing here knows about files, ranks or directions.

Megatron-Core's names are those of its local layer spec with global layer and expert indices
(`decoder.layers.7.mlp.experts.3.linear_fc1.weight`); each format translates them to its own spelling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from reshard.algebra.views import View, concat
from reshard.families.dims import Dims


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
) -> Iterator[Rule]:
    """Embedding, head and final norm by their names on the other side, and the padding of tables of `rows` rows.

    `change` is that of the embedding.
    """
    rows = rows or dims.vocab
    table = native(embedding, rows, dims.hidden)
    own = table if dims.tied else native(head, rows, dims.hidden)
    yield from [
        Rule("model.embed_tokens.weight", table[: dims.vocab], change=change),
        Rule("lm_head.weight", own[: dims.vocab], copy=dims.tied, written=not dims.tied),
        same("model.norm.weight", norm, dims.hidden),
    ]
    if rows > dims.vocab:
        yield Rule("", table[dims.vocab :], reason="vocabulary padding", change=change)
        if not dims.tied:
            yield Rule("", own[dims.vocab :], reason="vocabulary padding")


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

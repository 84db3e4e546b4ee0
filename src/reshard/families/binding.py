"""A family's rules at given sizes: every tensor of both sides as a view over the other side."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from reshard.algebra.views import Piece, View, covered, overlaps
from reshard.families.rules import Native, ReversibleStep, Rule


class DroppedElements(NamedTuple):
    """A source of elements that the other side does not have; `reason` names the rule."""

    reason: str


class BoundTensor(NamedTuple):
    """One tensor: the template that declares it, with its layer and expert filled in."""

    template: _TensorTemplate
    layer: int | None
    expert: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.template.view.shape

    @property
    def change(self) -> ReversibleStep | None:
        """What is done to each element of `view`."""
        return self.template.change

    @property
    def view(self) -> View:
        """The tensor, before `change`, as a view over the names of the other side."""
        return self.template.view.renamed(self._filled)

    @property
    def sources(self) -> Iterator[Hashable]:
        """The source name of each piece of `view`."""
        return (self._filled(piece.source) for piece in self.template.view.pieces)

    def _filled(self, source: Hashable) -> Hashable:
        return source.format(layer=self.layer, expert=self.expert) if isinstance(source, str) else source


@dataclass(frozen=True, slots=True)
class _TensorTemplate:
    name: str
    view: View  # over name patterns of the other side, or Dropped
    layers: Sequence[int]
    experts: int
    copy: bool = False
    written: bool = True
    change: ReversibleStep | None = None

    def instances(self) -> Iterator[tuple[str, BoundTensor]]:
        for layer in self.layers or (None,):
            for expert in range(self.experts) if self.experts else (None,):
                yield self.name.format(layer=layer, expert=expert), BoundTensor(self, layer, expert)


class Binding:
    """Both sides of a model, bound name by name.

    `hf` and `native` map tensor names to `BoundTensor`s. Copies are in `copies`, not in `hf`, what the Hub may have
    and is dropped is in `unread`, and every further place of a tensor of `hf` is in `repeats`. Raises ValueError if the
    rules are not a bijection, which is a bug in the family and not the user's fault.
    """

    def __init__(self, rules: Iterable[Rule]) -> None:
        rules = list(rules)
        self.hf: dict[str, BoundTensor] = {}
        self.copies: dict[str, BoundTensor] = {}
        self.unread: dict[str, BoundTensor] = {}
        for rule in rules:
            if rule.hf and not rule.repeats:
                bound = self.unread if rule.reason else self.copies if rule.copy else self.hf
                bound.update(_template(rule).instances())
        self.repeats = [each for rule in rules if rule.repeats for each in _template(rule).instances()]
        self.native: dict[str, BoundTensor] = {}
        for template in _inverted(rules):
            self.native.update(template.instances())

    def written(self) -> Iterator[tuple[str, BoundTensor]]:
        """The tensors of a Hugging Face folder, including those copies that the Hub stores."""
        yield from self.hf.items()
        yield from ((name, bound) for name, bound in self.copies.items() if bound.template.written)


def _template(rule: Rule) -> _TensorTemplate:
    view = rule.view.renamed(lambda source: source.name)  # type: ignore[attr-defined]
    return _TensorTemplate(rule.hf, view, rule.layers, rule.experts, rule.copy, rule.written, rule.change)


def _inverted(rules: Iterable[Rule]) -> Iterator[_TensorTemplate]:
    """Invert the rules: each native tensor as a view over the Hugging Face tensors that it contains."""
    pieces: dict[tuple[Native, tuple[int, ...], int, ReversibleStep | None], list[Piece]] = {}
    for rule in rules:
        if rule.copy:
            continue
        for piece in rule.view.pieces:
            assert isinstance(piece.source, Native)
            source: Hashable = DroppedElements(rule.reason) if rule.reason or not rule.hf else rule.hf
            back = rule.change.reversed if rule.change else None
            key = (piece.source, tuple(rule.layers), rule.experts, back)
            pieces.setdefault(key, []).append(piece.swapped(source))
    for (tensor, layers, experts, change), parts in pieces.items():
        view = View(tensor.shape, tuple(parts))
        if overlaps(view) or covered(view) != view.numel:
            raise ValueError(f"the rules for {tensor.name} {list(tensor.shape)} are no bijection")
        yield _TensorTemplate(tensor.name, view, layers, experts, change=change)

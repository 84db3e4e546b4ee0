"""Pickles without their classes: read them as data without running code, and write them for classes not imported here.

A pickle is a program: it names functions, and loading it calls them. `loads` never imports what a file names. A few
names are rebuilt as plain Python values, other names of known frameworks become inert `Opaque` objects, and every other
name is refused. Opcodes: the `pickletools` module of the standard library.
"""

from __future__ import annotations

import argparse
import io
import pickle
import reprlib
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from inspect import isroutine
from itertools import chain
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from reshard.algebra.dtypes import BY_NAME, DType
from reshard.base.errors import ReshardError, type_and_message
from reshard.containers.torchfiles import opcodes
from reshard.containers.torchfiles.untrusted import damaged_pickle, sizes

# fmt: off
FRAMEWORKS = frozenset((
    "torch", "torch_npu", "torchao", "numpy", "transformers", "accelerate", "peft", "trl", "deepspeed",
    "megatron", "transformer_engine", "apex", "mindspeed", "modellink", "nemo", "nemo_run", "omegaconf",
    "lightning", "pytorch_lightning", "lightning_fabric", "swift", "verl", "llamafactory", "fairscale",
    "internlm", "internevo", "tokenizers", "safetensors", "datasets", "__main__",
    "argparse", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "signal", "types",
    "typing", "uuid",
))
"""Top-level modules whose classes and functions are allowed in a checkpoint; each becomes an `Opaque`."""

INERT = frozenset((
    "copyreg._reconstructor", "copyreg.__newobj__", "collections.deque", "collections.Counter",
    "builtins.getattr", "builtins.object", "builtins.type", "builtins.int", "builtins.float",
    "builtins.bool", "builtins.str", "builtins.bytes", "builtins.list", "builtins.tuple", "builtins.dict",
))
"""Names outside of `FRAMEWORKS` that honest checkpoints contain; they become an `Opaque` too."""
# fmt: on


class Opaque:
    """An object whose class (or function) a pickle named: its parts are kept, its code is never imported.

    `args` are those of the call, `state` is what BUILD would have restored (usually a dict of attributes), `items` what
    was appended to it as a list or set in it as a dict (then pairs). A class that is only named, not called, becomes a
    subclass of `Opaque`; `module` and `name` identify it.
    """

    module = ""
    name = ""
    args: tuple[Any, ...]
    state: Any = None
    items: list[Any]
    called: bool = False
    """Whether the class was called, rather than created by `__new__` alone."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Opaque:
        self: Opaque = super().__new__(cls)
        self.args = (*args, kwargs) if kwargs else args
        self.items = []
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.called = True

    @property
    def qualname(self) -> str:
        """The full import name of the class or function, as in "signal.Signals"."""
        return f"{self.module}.{self.name}"

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, item: Any) -> None:
        """Append an item, for list subclasses."""
        self.items.append(item)

    def extend(self, items: Any) -> None:
        """Append items, for list subclasses."""
        self.items.extend(items)

    def __repr__(self) -> str:
        return f"<{self.qualname} of {len(self.args)}>"  # args may contain the same objects many times over


def opaque_class(module: str, name: str) -> type[Opaque]:
    """The stand-in for a class or function that a pickle names."""
    return type("Opaque", (Opaque,), {"module": module, "name": name})


def _made_by(build: Callable[..., Any]) -> type:
    """A class that returns `build(...)` when called or instantiated.

    NEWOBJ requires a class where REDUCE requires a callable. The class is new for each load, so that a pickle that sets
    attributes on it does not affect the next.
    """
    return type("Built", (), {"__new__": lambda cls, *args, **kwargs: build(*args, **kwargs)})


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """Bytes from the text that protocol 2 stores for them. Other codecs of `_codecs.encode` would import modules."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"codec {reprlib.repr(encoding)}")
    return text.encode("latin1")


class Namespace(argparse.Namespace):
    """A namespace with the attributes in a pickle's state, which cannot change its class."""

    def __setstate__(self, state: Any) -> None:
        vars(self).update({key: value for key, value in state.items() if isinstance(key, str)})


class Ordered(OrderedDict[Any, Any]):
    """A dict without the attributes in a pickle's state, which could shadow its methods."""

    def __setstate__(self, state: Any) -> None:
        pass


def _collection(kind: type, weigh: Callable[[Any], Any]) -> Callable[..., Any]:
    """A constructor of `kind` from a list only: a range of a billion would fill memory. `weigh` checks each item."""

    def build(items: list[Any] | tuple[Any, ...] = ()) -> Any:
        if not isinstance(items, list | tuple):
            raise pickle.UnpicklingError(f"{kind.__name__} of {type(items).__name__}")
        for item in items:
            weigh(item)
        return kind(items)

    return build


def _light(item: Any) -> None:
    """Raise ValueError for an item that would take long to hash; see `opcodes`."""
    waiting, seen = [item], 0
    while waiting:
        each, seen = waiting.pop(), seen + 1
        if seen == opcodes.MAX_WEIGHT:
            raise ValueError("a key of too many values")
        waiting += each if isinstance(each, tuple) else ()


def _size(value: Any) -> None:
    sizes((value,))


def _slice(*bounds: Any) -> slice:
    if not all(bound is None or isinstance(bound, int) for bound in bounds):
        raise pickle.UnpicklingError("a slice of something other than numbers")
    return slice(*bounds)


def _bytearray(content: bytes | str = b"", encoding: str = "latin1") -> bytearray:
    return bytearray(_encode(content, encoding) if isinstance(content, str) else bytes(memoryview(content)))


MAX_RANGE_LENGTH = 1 << 16
"""Maximum length of a range that becomes a `range`; a longer one becomes an `Opaque` with its bounds."""


def _range(*bounds: int) -> Any:
    numbers = range(*bounds)
    return opaque_class("builtins", "range")(*bounds) if numbers[MAX_RANGE_LENGTH:] else numbers


def _path(*parts: str) -> str:
    return str(PurePosixPath(*parts))


_REBUILT: dict[str, Callable[..., Any]] = {
    "builtins.set": _collection(set, _light),
    "builtins.frozenset": _collection(frozenset, _light),
    "builtins.bytearray": _bytearray,
    "builtins.complex": complex,
    "builtins.slice": _slice,
    "builtins.range": _range,
    "collections.OrderedDict": _collection(Ordered, lambda item: _light(item[0])),
    "collections.defaultdict": lambda *factory: defaultdict(None),
    "argparse.Namespace": lambda *args: Namespace(),
    "torch.Size": _collection(tuple, _size),
    "_codecs.encode": _encode,
}


class Immutable:
    """Values that are passed to a pickle while it loads, and must not change.

    BUILD sets the fields even of a frozen dataclass. A tensor whose path or offset a pickle rewrites would make reshard
    copy bytes of another file.
    """

    def __init__(self) -> None:
        self._copies: list[tuple[Any, Any]] = []

    def add(self, value: Any) -> Any:
        """Return `value`, a dataclass, and remember its fields."""
        self._copies.append((value, replace(value)))
        return value

    def intact(self) -> bool:
        """Whether no value has changed since."""
        return all(value == copy for value, copy in self._copies)


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        data: bytes,
        file: str,
        rebuild: Mapping[str, Any],
        persistent_load: Callable[[Any], Any] | None,
        sealed: Immutable,
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._file = file
        self._rebuild = rebuild
        self._look_up = persistent_load
        self._sealed = sealed

    def persistent_load(self, key: Any) -> Any:
        if self._look_up is None:
            raise pickle.UnpicklingError("a persistent object where none is expected")
        return self._look_up(key)

    def find_class(self, module: str, name: str) -> Any:
        # Protocol 2, which torch writes, uses the names of Python 2.
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        qualname = f"{module}.{name}"
        rebuilt = self._rebuild.get(qualname, _REBUILT.get(qualname))
        if rebuilt is not None:
            return _made_by(rebuilt) if isroutine(rebuilt) else rebuilt
        if module == "torch" and name in BY_NAME:
            return self._sealed.add(replace(BY_NAME[name]))
        top = module.partition(".")[0]
        if top == "pathlib":
            return _made_by(_path)
        if top in FRAMEWORKS or qualname in INERT:
            return opaque_class(module, name)
        raise ReshardError(
            "pickle-refused",
            f"refused to load {qualname} named by the pickle in {self._file}; nothing was executed",
            file=self._file,
            rule="a pickle may name classes of known training frameworks only",
            found=qualname,
            remedy="if you do not trust the file's author, delete it; otherwise save the checkpoint again "
            "with plain values instead",
        )


def loads(
    data: bytes,
    file: str,
    *,
    rebuild: Mapping[str, Any] | None = None,
    persistent_load: Callable[[Any], Any] | None = None,
    sealed: Immutable | None = None,
) -> Any:
    """The objects in the pickle `data` of `file`; torch dtypes become `DType`s, paths strings.

    `rebuild` maps qualified names to the function, class or value to use for them: pass classes that are made for this
    load only, or a pickle could alter them for the next. `sealed` checks the values from `rebuild` and
    `persistent_load`. Raises ReshardError for a refused name and for a damaged pickle.
    """
    sealed = sealed or Immutable()
    try:
        opcodes.StackMachine(data).run()
        content = _Unpickler(data, file, rebuild or {}, persistent_load, sealed).load()
        intact = sealed.intact()
    except ReshardError:
        raise
    except Exception as error:  # a hostile or damaged pickle can raise anything
        raise damaged_pickle(file, type_and_message(error)) from None
    if not intact:
        raise damaged_pickle(file, "it rewrites the tensors that it describes")
    return content


class Global(NamedTuple):
    """A class or function by name, imported when the pickle is loaded."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Reduce:
    """The result of `function(*args)` when the pickle is loaded, with `state` restored into it."""

    function: Global
    args: tuple[Any, ...] = ()
    state: Any = None
    new: bool = False
    """Create it by `function.__new__(function, *args)`, which does not run `__init__`."""


@dataclass(frozen=True, slots=True)
class Persistent:
    """An object that the loader looks up by `key`: a storage, in torch files."""

    key: tuple[Any, ...]


@dataclass(frozen=True, eq=False, slots=True)
class SharedObject:
    """An object that is written where it first occurs, and referenced from then on."""

    value: Any


class Pickler:
    """Writes protocol 2, which `torch.load(weights_only=True)` reads.

    It supports plain values, `DType`, `argparse.Namespace`, `Opaque` and the nodes above. Strings and globals are
    written once and referenced; a list or dict that occurs twice is written twice.
    """

    def __init__(self) -> None:
        self._out = io.BytesIO()  # getvalue() returns its content without a copy
        self.raw(b"\x80\x02")
        self._memo: dict[Any, bytes] = {}
        self._writers: dict[type, Callable[[Any], None]] = {
            type(None): lambda value: self.raw(b"N"),
            bool: lambda value: self.raw(b"\x88" if value else b"\x89"),
            int: lambda value: self.raw(encode_int(value)),
            float: lambda value: self.raw(b"G" + struct.pack(">d", value)),
            str: self._string,
            bytes: self._bytes,
            list: self._list,
            tuple: self._tuple,
            dict: self._dict,
            set: lambda value: self.write(Reduce(Global("builtins", "set"), (sorted(value),))),
            OrderedDict: self._ordered,
            Ordered: self._ordered,
            Global: self._global,
            Reduce: self._reduce,
            Persistent: self._persistent,
            SharedObject: self._once,
            DType: lambda value: self.write(Global("torch", value.name)),
            argparse.Namespace: self._namespace,
            Namespace: self._namespace,
        }

    def finish(self) -> bytes:
        """The finished pickle of one object."""
        self.raw(b".")
        return self._out.getvalue()

    def raw(self, opcodes: bytes) -> None:
        """Append opcodes unchanged."""
        self._out.write(opcodes)

    def memoize(self, key: Any) -> bytes:
        """Memoize the object on top of the stack under `key`; returns the opcode that fetches it."""
        index = len(self._memo)
        if index < 256:
            self.raw(b"q%c" % index)
            self._memo[key] = b"h%c" % index
        else:
            number = struct.pack("<I", index)
            self.raw(b"r" + number)
            self._memo[key] = b"j" + number
        return self._memo[key]

    def recall(self, key: Any) -> bool:
        """Fetch the object that was memoized under `key`; returns whether there is one."""
        opcode = self._memo.get(key)
        if opcode is None:
            return False
        self.raw(opcode)
        return True

    def prepare(self, value: Any) -> bytes:
        """Write and memoize a hashable `value` now, pop it, and return the opcode that fetches it."""
        if value not in self._memo:
            self.write(value)
            if value not in self._memo:
                self.memoize(value)
            self.raw(b"0")
        return self._memo[value]

    def write(self, value: Any) -> None:
        """Append one object. Raises TypeError if its type is not supported."""
        writer = self._writers.get(type(value))
        if writer is not None:
            writer(value)
        elif isinstance(value, Opaque):
            self._opaque(value)
        elif isinstance(value, type) and issubclass(value, Opaque):
            self._global(Global(value.module, value.name))
        else:
            raise TypeError(f"cannot write a {type(value).__name__} into a pickle")

    def _string(self, value: str) -> None:
        if not self.recall(value):
            encoded = value.encode("utf-8", "surrogatepass")
            self.raw(b"X" + struct.pack("<I", len(encoded)) + encoded)
            self.memoize(value)

    def _bytes(self, value: bytes) -> None:
        self.write(Reduce(Global("_codecs", "encode"), (value.decode("latin1"), "latin1")))

    def _list(self, value: list[Any]) -> None:
        self.raw(b"]")
        self._batch(value, b"e")

    def _batch(self, values: Any, opcode: bytes) -> None:
        self.raw(b"(")
        for item in values:
            self.write(item)
        self.raw(opcode)

    def _tuple(self, value: tuple[Any, ...]) -> None:
        if 1 <= len(value) <= 3:
            for item in value:
                self.write(item)
            self.raw(b"\x85\x86\x87"[len(value) - 1 : len(value)])
        elif value:
            self._batch(value, b"t")
        else:
            self.raw(b")")

    def _dict(self, value: Mapping[Any, Any]) -> None:
        self.raw(b"}")
        if value:
            self._batch(chain.from_iterable(value.items()), b"u")

    def _ordered(self, value: Mapping[Any, Any]) -> None:
        self.write(Reduce(Global("collections", "OrderedDict")))
        if value:
            self._batch(chain.from_iterable(value.items()), b"u")

    def _namespace(self, value: argparse.Namespace) -> None:
        self.write(Reduce(Global("argparse", "Namespace"), (), vars(value), new=True))

    def _global(self, value: Global) -> None:
        if self.recall(value):
            return
        if "." in value.name:
            raise TypeError(f"protocol 2 cannot name the nested class {value.module}.{value.name}")
        self.raw(f"c{value.module}\n{value.name}\n".encode())
        self.memoize(value)

    def _reduce(self, value: Reduce) -> None:
        self.write(value.function)
        self._tuple(value.args)
        self.raw(b"\x81" if value.new else b"R")
        if value.state is not None:
            self.write(value.state)
            self.raw(b"b")

    def _once(self, value: SharedObject) -> None:
        if not self.recall(value):
            self.write(value.value)
            self.memoize(value)

    def _persistent(self, value: Persistent) -> None:
        self._tuple(value.key)
        self.raw(b"Q")

    def _opaque(self, value: Opaque) -> None:
        function = Global(value.module, value.name)
        self._reduce(Reduce(function, value.args, value.state, new=not value.called))
        if value.items:
            pairs = all(isinstance(item, tuple) and len(item) == 2 for item in value.items)
            self._batch(chain.from_iterable(value.items) if pairs else value.items, b"u" if pairs else b"e")


def encode_int(value: int) -> bytes:
    """The shortest opcode for an integer of up to 255 bytes."""
    if 0 <= value < 1 << 8:
        return b"K%c" % value
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    encoded = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a%c" % len(encoded) + encoded


def dumps(value: Any) -> bytes:
    """The pickle of `value`; see `Pickler` for supported types."""
    pickler = Pickler()
    pickler.write(value)
    return pickler.finish()

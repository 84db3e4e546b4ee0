"""Check a pickle before it is loaded: refuse one that would take more memory than its size allows, or too much time.

The unpickler of the standard library trusts the numbers in a pickle. An index into its memo (LONG_BINPUT, PUT) makes
the memo that long, and a byte count (BYTEARRAY8) allocates a buffer of that size, before anything of it is read. Ten
bytes could request gigabytes.

It also hashes every key. A tuple is hashed element by element, so that a pair of a pair of a pair … each containing the
same one twice takes years, and a tuple nested a hundred thousand times overflows the interpreter's stack. So this
module simulates the unpickler's stack, with only the weight of each object on it: for a tuple the number of values on
all its levels, one for anything else.
"""

import pickletools

MAX_WEIGHT = 255
"""The maximum weight. A key with this weight is refused: honest ones are names, numbers and pairs of them."""

_COUNTS = {-2: 1, -3: 4, -4: 4, -5: 8}
"""The size in bytes of a count at the beginning of an argument, by `pickletools` argument size."""
_LINE, _PAIR = -1, "stringnl_noescape_pair"
_TAKES = {ord("a"): 1, ord("s"): 2}
"""The number of objects that an opcode takes off the stack, to put them into the one below."""
_MAKES = {ord("Q"): 1, 0x92: 3, 0x93: 2}
"""The number of objects that an opcode replaces by a new one."""
_TO_MARK = b"dleuot1i\x90\x91"
_KEYS = {ord("u"): 2, ord("d"): 2, 0x90: 1, 0x91: 1}
"""Opcodes that hash the objects above the mark: every second one, or all."""


def _widths() -> tuple[list[int], dict[int, int], dict[int, int]]:
    """By opcode: sizes of those that push one plain object; sizes of byte counts; numbers of argument lines."""
    pushes, counts, lines = [0] * 256, {}, {}
    for opcode in pickletools.opcodes:
        code, size = ord(opcode.code), opcode.arg.n if opcode.arg else 0
        if size == _LINE:
            lines[code] = 2 if opcode.arg and opcode.arg.name == _PAIR else 1
        elif size < 0:
            counts[code] = _COUNTS[size]
        elif not opcode.stack_before and len(opcode.stack_after) == 1 and opcode.code not in "(hj":
            pushes[code] = 1 + size
    return pushes, counts, lines


_PUSHES, _COUNTED, _LINES = _widths()


class StackMachine:
    """The unpickler's stack, marks and memo, as weights."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._stack: list[int] = []
        self._marks: list[int] = []
        self._memo = bytearray()  # weights by index; 0 for unused indices
        self._put = 0  # number of used indices

    def run(self) -> None:
        """Raise ValueError if the pickle requests more memory than it can fill, or sets a key that is too heavy.

        If it ends early or has an unknown opcode, the unpickler reports that. The most frequent opcodes come first:
        large pickles have millions of them.
        """
        data, stack, memo, pushes, end = self._data, self._stack, self._memo, _PUSHES, len(self._data)
        at = 0
        while at < end:
            code = data[at]
            if width := pushes[code]:
                stack.append(1)
                at += width
            elif code == 0x94 and self._put == len(memo):  # MEMOIZE
                memo.append(stack[-1])
                self._put += 1
                at += 1
            elif code == 0x68 or code == 0x6A:  # BINGET, LONG_BINGET
                width = 2 if code == 0x68 else 5
                place = data[at + 1] if code == 0x68 else int.from_bytes(data[at + 1 : at + 5], "little")
                stack.append(memo[place] if place < len(memo) else 1)
                at += width
            elif code == 0x52 or code == 0x81:  # REDUCE, NEWOBJ
                stack.pop()
                stack[-1] = 1
                at += 1
            elif 0x85 <= code <= 0x87:  # TUPLE1 to TUPLE3
                weight = 1 + sum(stack[0x84 - code :])
                del stack[0x84 - code :]
                stack.append(weight if weight < MAX_WEIGHT else MAX_WEIGHT)
                at += 1
            elif code == 0x62:  # BUILD
                stack.pop()
                at += 1
            elif code == 0x28:  # MARK
                self._marks.append(len(stack))
                at += 1
            elif code == 0x2E:  # STOP
                return
            else:
                at = self._to_mark(code, at) if code in _TO_MARK else self._rare(code, at)

    def _hash(self, weight: int) -> None:
        if weight >= MAX_WEIGHT:
            raise ValueError(f"a key of {MAX_WEIGHT} values or more, which honest pickles do not have")

    def _to_mark(self, code: int, at: int) -> int:
        """Remove all objects above the last mark; returns the position of the next opcode."""
        begin = self._marks.pop()
        if step := _KEYS.get(code):
            self._hash(max(self._stack[begin::step], default=1))
        weight = min(MAX_WEIGHT, 1 + sum(self._stack[begin:])) if code == ord("t") else 1
        del self._stack[begin:]
        if code in b"dlot\x91i":
            self._stack.append(weight)
        return self._lines(code, at) if code in _LINES else at + 1

    def _rare(self, code: int, at: int) -> int:
        """Handle a rare opcode, or one whose argument must be checked; returns the position of the next one."""
        stack = self._stack
        if width := _COUNTED.get(code):
            count = int.from_bytes(self._data[at + 1 : at + 1 + width], "little")
            if at + 1 + width + count > len(self._data):
                raise ValueError(f"it counts {count} bytes where there are fewer")
            is_number = code == 0x8B  # LONG4: hashing takes time in proportion to its length, each time
            stack.append(min(MAX_WEIGHT, 1 + count // 256) if is_number else 1)
            return at + 1 + width + count
        if code in _LINES:
            end = self._lines(code, at)
            if code == ord("p"):
                self._memoize(int(self._data[at + 1 : end - 1]))
            elif code == ord("g"):
                place = int(self._data[at + 1 : end - 1])
                stack.append(self._memo[place] if 0 <= place < len(self._memo) else 1)
            else:
                stack.append(1)
            return end
        if code in _TAKES:
            self._hash(stack[-2] if code == ord("s") else 1)
            del stack[-_TAKES[code] :]
            return at + 1
        if code in _MAKES:
            stack[-_MAKES[code] :] = [1]
            return at + 1
        if code == 0x71:  # BINPUT
            self._memoize(self._data[at + 1])
            return at + 2
        if code == 0x72:  # LONG_BINPUT
            self._memoize(int.from_bytes(self._data[at + 1 : at + 5], "little"))
            return at + 5
        if code == 0x94:  # MEMOIZE, after a PUT that skipped indices
            self._memoize(self._put)
        elif code == 0x32:  # DUP
            stack.append(stack[-1])
        elif code == 0x30:  # POP, which removes the mark if that is on top
            (self._marks if self._marks and self._marks[-1] == len(stack) else stack).pop()
        elif code not in (0x80, 0x95, 0x98):  # PROTO, FRAME, READONLY_BUFFER
            return len(self._data)
        return at + {0x80: 2, 0x95: 9}.get(code, 1)

    def _lines(self, code: int, at: int) -> int:
        """The end of an opcode's argument lines; the end of the pickle, if they are incomplete."""
        for _ in range(_LINES[code]):
            at = self._data.find(b"\n", at) + 1
            if not at:
                return len(self._data)
        return at

    def _memoize(self, place: int) -> None:
        if place > len(self._data):
            raise ValueError("it numbers more objects than it can contain")
        if place >= len(self._memo):
            self._memo.extend(bytes(place + 1 - len(self._memo)))
        self._put += not self._memo[place]
        self._memo[place] = self._stack[-1]

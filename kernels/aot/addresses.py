"""Whether products take their operands from shared memory where there are some: a check of machine code for sm_90.

A product of a group of warps (HGMMA) is given the address of an operand in two uniform registers, as a descriptor (PTX
ISA, "Matrix descriptor"): in the low word the address, in the high one the distance of groups of rows and the kind of
swizzle. ptxas of CUDA 12.8 has made code in which these registers hold other numbers, such as a token's. So uniform
instructions are followed, in order, with large numbers for what only a launch knows, and each descriptor is looked at.
What comes by instructions that are not followed is unknown, and no flaw; so is, where a branch
forward ends, all that has been written since it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

LABEL, BRANCH = re.compile(r"^\s*(\.L\w+):"), re.compile(r"`\((\.L\w+)\)")
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]+)\*/\s+(@!?U?P\w+\s+)?([A-Za-z0-9_.]+)\s+(.*?)\s*;")
DESCRIPTOR = re.compile(r"gdesc\[UR(\d+)\]")
REGISTER, NUMBER = re.compile(r"UR(\d+)"), re.compile(r"-?0x[0-9a-f]+|-?\d+")
PREDICATE = re.compile(r"!?U?P[\dT]")
MASK = 0xFFFFFFFF
OUTSIDE = 0x51234567  # of a launch; any address and any distance made of it is out of bounds
ADDRESS_MASK, ADDRESS_UNIT = 0x3FFF, 16
MOST_DISTANCE = 1024 // ADDRESS_UNIT  # of 8 rows of 128 bytes

Value = int | None  # of a register; None: unknown


def wrong_addresses(assembly: str, shared: int) -> list[str]:
    """Products whose operands do not lie in shared memory, as sentences.

    Args:
        assembly: of one kernel, as ``disassemble`` gives it.
        shared: bytes of shared memory of a block.
    """
    state, wrong = _Uniform(), []
    for line in assembly.splitlines():
        found = INSTRUCTION.match(line)
        if found is None:
            if label := LABEL.match(line):
                state.join(label.group(1))
            continue
        at, predicate, name, rest = found.groups()
        if branch := BRANCH.search(rest):
            state.left_out.setdefault(branch.group(1), set())
        elif name.startswith("HGMMA"):
            wrong += [f"product at {at} reads {flaw}" for flaw in state.flaws_of(rest, shared)]
        else:
            state.run(name, [x.strip() for x in rest.split(",")], is_conditional=predicate is not None)
    return wrong


@dataclass
class _Uniform:
    """Uniform registers, and carries of their sums."""

    registers: dict[int, Value] = field(default_factory=dict)
    carries: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, set[int]] = field(default_factory=dict)  # by label: registers written since a branch there

    def join(self, label: str) -> None:
        """Forget what a branch to this label leaves out, and carries."""
        for at in self.left_out.pop(label, ()):
            self.registers.pop(at, None)
        self.carries.clear()

    def flaws_of(self, operands: str, shared: int) -> list[str]:
        """What is wrong with the last operand, and with the first one, if that is given by address too."""
        flaws = []
        for first in map(int, DESCRIPTOR.findall(operands)):
            is_alone = re.match(r"R\d+, R\d+", operands) is not None
            for low, high in [(2, 3)] + [(0, 1)] * (not is_alone):
                address, shape = self.registers.get(first + low), self.registers.get(first + high)
                if address is not None and (address & ADDRESS_MASK) * ADDRESS_UNIT >= shared + 0x400:
                    flaws.append(f"byte {(address & ADDRESS_MASK) * ADDRESS_UNIT} of {shared}")
                elif shape is not None and shape & ADDRESS_MASK > MOST_DISTANCE:
                    flaws.append(f"rows {(shape & ADDRESS_MASK) * ADDRESS_UNIT} bytes apart")
        return flaws

    def run(self, name: str, operands: Sequence[str], is_conditional: bool) -> None:
        """Follow one instruction."""
        written = next((i for i, x in enumerate(operands) if not PREDICATE.fullmatch(x)), 0)
        for predicate in operands[:written]:
            self.carries.pop(predicate, None)
        operands = operands[written:]
        found = REGISTER.fullmatch(operands[0])
        if found is None:
            return
        at, values = int(found.group(1)), self._results(name, operands)
        for i, value in enumerate(values):
            self.registers[at + i] = None if is_conditional else value
            for left_out in self.left_out.values():
                left_out.add(at + i)

    def _results(self, name: str, operands: Sequence[str]) -> tuple[Value, ...]:
        """Of the register that is written, and of the next one, where that is or may be written too."""
        if name == "UIADD3.64":
            return self._wide_sum(operands)
        result = self._result(name, operands)
        if name.startswith("ULDC") and ".64" in name:
            return result, OUTSIDE
        return (result, None) if ".64" in name or ".WIDE" in name else (result,)

    def _result(self, name: str, operands: Sequence[str]) -> Value:
        match name.split(".")[0]:
            case "UMOV":
                return self._value(operands[1])
            case "ULDC":
                return OUTSIDE
            case "S2UR":
                return 0 if "Cga" in operands[1] or "CGA" in operands[1] else OUTSIDE
            case "UIADD3":
                return self._sum(operands, ".X" in name)
            case "ULEA":
                return self._shifted(operands[1], operands[3], operands[2]) if len(operands) == 4 else None
            case "USHF" if name == "USHF.R.U32.HI":
                value, by = self._value(operands[3]), self._value(operands[2])
                return None if value is None or by is None else value >> by
            case "USGXT" if name == "USGXT.U32":
                value, bits = self._value(operands[1]), self._value(operands[2])
                return None if value is None or bits is None else value & ((1 << bits) - 1)
        return None

    def _sum(self, operands: Sequence[str], takes_carries: bool) -> Value:
        """Of three operands, behind those that carries go to; those that carries come from are the last ones."""
        out = [x for x in operands[1:3] if PREDICATE.fullmatch(x)]
        values = [self._value(x) for x in operands[1 + len(out) : 4 + len(out)]]
        known = [x for x in values if x is not None]
        if len(known) < 3:
            for carry in out:
                self.carries.pop(carry, None)
            return None
        total = sum(known)
        if takes_carries:
            carries = [self.carries.get(x) for x in operands[4 + len(out) :] if not x.endswith("UPT")]
            if None in carries:
                return None
            total += sum(x for x in carries if x is not None)
        if out:
            self.carries[out[0]] = total >> 32
        return total & MASK

    def _wide_sum(self, operands: Sequence[str]) -> tuple[Value, Value]:
        found, added = REGISTER.fullmatch(operands[1]), self._value(operands[2])
        low, high = (self.registers.get(int(found.group(1)) + i) for i in (0, 1)) if found else (None, None)
        if low is None or high is None or added is None or operands[3] != "URZ":
            return None, None
        total = low + (high << 32) + added
        return total & MASK, (total >> 32) & MASK

    def _shifted(self, operand: str, by: str, added: str) -> Value:
        value, bits, other = self._value(operand), self._value(by), self._value(added)
        return None if value is None or bits is None or other is None else ((value << bits) + other) & MASK

    def _value(self, operand: str) -> Value:
        operand = operand.removesuffix(".reuse")
        if operand.lstrip("-") in ("URZ", "RZ"):
            return 0
        if NUMBER.fullmatch(operand):
            return int(operand, 0) & MASK
        found = REGISTER.fullmatch(operand)
        return self.registers.get(int(found.group(1))) if found else None

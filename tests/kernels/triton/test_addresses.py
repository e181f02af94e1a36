"""Machine code whose products read what is no operand, in the words of the disassembler."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")
from specmamba.kernels.aot.addresses import wrong_addresses

SHARED = 0x4000
LABEL = re.compile(r"^.*(\.L\w+:) ;$")  # it has no number
BASE = """
UMOV UR5, 0x400
S2UR UR4, SR_CgaCtaId
ULEA UR5, UR4, UR5, 0x18
USHF.R.U32.HI UR6, URZ, 0x4, UR5
USGXT.U32 UR6, UR6, 0xe
"""
TOKEN = """
S2UR UR9, SR_CTAID.X
ULDC UR8, c[0x0][0x268]
ULEA UR8, UR9, UR8, 0x6
"""
DESCRIPTOR = """
UIADD3 UR18, UP0, {low}, {offset}, URZ
UMOV UR7, URZ
UIADD3.X UR19, {high}, 0x40000040, URZ, UP0, !UPT
"""
SECOND = "UIADD3.64 UR14, UR18, {offset}, URZ"
PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, {first}gdesc[UR{at}].tnspB, R24 ;"


def flaws(*lines: str) -> list[str]:
    code = "\n".join(lines).strip().splitlines()
    numbered = (
        f"        /*{16 * i:04x}*/                   {line.rstrip(' ;')} ;" for i, line in enumerate(code) if line
    )
    return wrong_addresses("\n".join(LABEL.sub(r"\1", line) for line in numbered), SHARED)


def descriptor(low: str = "UR6", high: str = "UR7", offset: int = 0x80) -> str:
    return DESCRIPTOR.format(low=low, high=high, offset=hex(offset))


def product(at: int = 16, first: str = "R60, ") -> str:
    return PRODUCT.format(at=at, first=first)


def test_operands_in_shared_memory() -> None:
    second = SECOND.format(offset="0x80")
    assert not flaws(BASE, TOKEN, descriptor(), product(), second, product(12), product())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (descriptor(low="UR8"), "product at .* reads byte [0-9]+ of 16384"),
        (descriptor(high="UR8"), "reads rows [0-9]+ bytes apart"),
        (descriptor(offset=0x400), "reads byte 17408 of 16384"),
        (descriptor() + SECOND.format(offset="0x400") + "\nUMOV UR18, UR14\nUMOV UR19, UR15", "of 16384"),
    ],
)
def test_operands_elsewhere(wrong: str, message: str) -> None:
    """A token's number in either word of a descriptor, and what lies behind shared memory."""
    found = flaws(BASE, TOKEN, wrong, product())
    assert len(found) == 1
    assert re.search(message, found[0])


def test_both_operands_by_address() -> None:
    first = descriptor(low="UR8").replace("UR18", "UR16").replace("UR19", "UR17")
    assert len(flaws(BASE, TOKEN, descriptor(), first, product(first=""))) == 1
    assert not flaws(BASE, TOKEN, descriptor(), first, product())


def test_what_is_not_known_is_no_flaw() -> None:
    assert not flaws(BASE, descriptor(low="UR40"), product())
    assert not flaws(BASE, "R2UR UR6, R4", descriptor(), product())
    assert not flaws(BASE, TOKEN, descriptor(), "@P0 UMOV UR18, UR8", product())
    assert not flaws(BASE, TOKEN, "UMOV UR18, UR8", "ULOP3.LUT UP0, UR18, UR3, UR4, URZ, 0xc0, !UPT", product())
    assert not flaws(BASE, TOKEN, "UMOV UR19, UR8", "UIMAD.WIDE UR18, UR3, UR4, URZ", product())


def test_branches() -> None:
    """What a branch forward leaves out is not known behind it; a loop begins with what is before it."""
    branch, label, back = "@P0 BRA `(.L_x_0)", ".L_x_0:", "@P0 BRA `(.L_x_1)"
    assert not flaws(BASE, TOKEN, descriptor(), branch, "UMOV UR18, UR8", label, product())
    assert len(flaws(BASE, TOKEN, descriptor(), "UMOV UR18, UR8", branch, "UMOV UR3, UR8", label, product())) == 1
    assert len(flaws(BASE, TOKEN, descriptor(low="UR8"), ".L_x_1:", product(), back)) == 1

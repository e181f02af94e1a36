"""Plain text for terminals: sizes with units, and aligned columns."""

from collections.abc import Sequence

TableRow = tuple[str, str, str]
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def readable(num_bytes: int) -> str:
    """Format a size with a unit and about three digits."""
    size, unit = float(num_bytes), 0
    while size >= 1000 and unit < len(UNITS) - 1:  # 1023 B is 1.0 KiB: never four digits
        size, unit = size / 1024, unit + 1
    return f"{size:.1f} {UNITS[unit]}" if unit and size < 100 else f"{size:.0f} {UNITS[unit]}"


def aligned(rows: Sequence[TableRow]) -> list[str]:
    """Align rows of a name, a size (to the right) and a remark; return one line per row."""
    names, sizes = (max(len(row[i]) for row in rows) for i in range(2))
    return [f"{name:<{names}}  {size:>{sizes}}  {remark}".rstrip() for name, size, remark in rows]

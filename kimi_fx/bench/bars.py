"""A picture of where a round's time goes: a bar a row, cut into parts, over the bar of the same parts' floors."""

from collections.abc import Mapping, Sequence

COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b8b0ac", "#76b7b2", "#b07aa1")
LEFT, WIDTH, ROW, RIGHT = 260, 640, 44, 130


def bars(rows: Sequence[tuple[str, str, Mapping[str, float], Mapping[str, float]]]) -> str:
    """SVG of (label, note after the bar, seconds of each part, floors of each part), all to one scale."""
    most = max(sum(seconds.values()) for _, _, seconds, _ in rows)
    shapes = [legend(list(rows[0][2]))]
    for i, (label, note, seconds, floors) in enumerate(rows):
        y = ROW * (i + 1)
        shapes.append(f'<text x="{LEFT - 10}" y="{y + 18}" text-anchor="end">{label}</text>')
        shapes += [stack(seconds, most, y, 22), stack(floors, most, y + 24, 8)]
        shapes.append(f'<text x="{LEFT + WIDTH * sum(seconds.values()) / most + 8:.1f}" y="{y + 18}">{note}</text>')
    size = f'width="{LEFT + WIDTH + RIGHT}" height="{ROW * (len(rows) + 1)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="14">'
    return "\n".join([head, *shapes, "</svg>\n"])


def stack(seconds: Mapping[str, float], most: float, y: int, height: int) -> str:
    x, shapes = float(LEFT), []
    for colour, part in zip(COLOURS, seconds.values(), strict=True):
        width = WIDTH * part / most
        shapes.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{colour}"/>')
        x += width
    return "".join(shapes)


def legend(parts: Sequence[str]) -> str:
    """Names in their colours, above the first bar."""
    places = zip(COLOURS, parts, range(LEFT, LEFT + 90 * len(parts), 90), strict=True)
    return "".join(f'<text x="{x}" y="26" fill="{colour}">{part}</text>' for colour, part, x in places)

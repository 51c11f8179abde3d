# SPDX-License-Identifier: GPL-2.0-or-later
"""Growth with the number of ports, as an SVG: both axes logarithmic, a line for each contestant."""
import math

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 340, 64, 130, 34, 44
COLOURS = {"agentgate": "#0b6e4f", "docker-bridge": "#2463b5", "script": "#b5422c", "plain-bridge": "#777777"}


def decades(values):
    low = math.floor(math.log10(min(values)))
    high = math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def growth(title, unit, series):
    """series: contestant -> [(ports, median, p95)]; the p95 is a tick above the point."""
    series = {name: [(p, max(m, 1e-3), max(q, 1e-3)) for p, m, q in points] for name, points in series.items()}
    points = [point for line in series.values() for point in line]
    x0, x1 = decades([p for p, _, _ in points])
    y0, y1 = decades([v for _, m, q in points for v in (m, q)])

    def x(ports):
        return LEFT + (math.log10(ports) - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)

    def y(value):
        return HEIGHT - BOTTOM - (math.log10(value) - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
           'font-size="12">', f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
           f'<text x="{LEFT}" y="20" font-size="14">{title}, {unit}: median, and p95 as a tick</text>']
    for power in range(x0, x1 + 1):
        at = x(10 ** power)
        out.append(f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        out.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{10 ** power}</text>')
    for power in range(y0, y1 + 1):
        at = y(10 ** power)
        out.append(f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{10 ** power:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    out.append(f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">ports on the host</text>')
    taken = []
    for name, line in sorted(series.items(), key=lambda one: one[1][-1][1]):
        colour = COLOURS.get(name, "black")
        path = " ".join(f"{x(p):.1f},{y(m):.1f}" for p, m, _ in line)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for p, m, q in line:
            out.append(f'<circle cx="{x(p):.1f}" cy="{y(m):.1f}" r="3" fill="{colour}"/>')
            out.append(f'<path d="M{x(p):.1f},{y(m):.1f}V{y(q):.1f}m-3,0h6" stroke="{colour}" fill="none"/>')
        label = y(line[-1][1]) + 4
        while any(abs(label - other) < 13 for other in taken):
            label -= 2
        taken.append(label)
        out.append(f'<text x="{x(line[-1][0]) + 8:.1f}" y="{label:.1f}" fill="{colour}">{name}</text>')
    return "\n".join([*out, "</svg>", ""])

"""Draws a roofline: the decoding speed that memory and arithmetic allow, by operations per byte read, and the measured
speed.

Williams et al. 2009, "Roofline: an insightful visual performance model".
"""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from onward.measuring.generation import MachineLimits, Speed
from onward.reports.pictures.markup import visible
from onward.reports.pictures.picture import Panel, Picture
from onward.reports.pictures.plot import Frame, Heights, log_ticks, short

WIDTH, HEIGHT = 560.0, 340.0
STYLES = {"more": 4, "less": -6, "third": 15, "soft": 4}  # style of each precision, and offset of its labels in pixels


def roofline(name: str, speeds: Sequence[Speed], limits: MachineLimits) -> Picture:
    """Decoding speeds as points under the machine's limits: bandwidth times intensity (operations per byte), and the
    peak of each dtype."""
    caption = (
        "A decoding step of few rows is limited by memory bandwidth (the sloping line, "
        f"{limits.bandwidth / 1e9:.1f} GB/s here). With more rows, each weight that is read is used more often, which "
        "moves the point to the right, up to the peak arithmetic throughput (the level line)."
    )
    return Picture(f"Decoding of {name} on this machine", caption, [panel(speeds, limits)])


def panel(speeds: Sequence[Speed], limits: MachineLimits) -> Panel:
    """Operations per second by operations per byte, both logarithmic."""
    reached = [speed.intensity * speed.bandwidth_share * limits.bandwidth for speed in speeds]
    peak, xs = max(limits.flops.values()), [speed.intensity for speed in speeds]
    low, high = min(xs) / 2, max(*xs, peak / limits.bandwidth) * 2
    frame = Frame(WIDTH, HEIGHT, 64, WIDTH - 90, 14, HEIGHT - 40, np.array([np.log([low, high])] * 3))
    y = Heights(frame, min(min(reached), low * limits.bandwidth) / 2, peak * 2, log=True)
    x = lambda intensities: frame.x(np.log(np.array([intensities])))
    parts = [y.grid(6)]
    for tick in log_ticks(low, high, 8):
        place = float(x([tick])[0])
        parts.append(f'<text x="{place:.1f}" y="{frame.bottom + 16:g}" text-anchor="middle">{short(tick)}</text>')
    parts.append(
        f'<text x="{frame.right:g}" y="{HEIGHT - 6:g}" text-anchor="end">operations per byte read</text>'
        f'<text x="{frame.left:g}" y="10">operations per second</text>'
    )
    for dtype, flops in limits.flops.items():
        corner = flops / limits.bandwidth
        intensities = np.array([low, corner, high])
        points = zip(x(intensities), y(np.minimum(intensities * limits.bandwidth, flops)))
        parts.append('<path class="validation" d="M' + "L".join(f"{a:.1f} {b:.1f}" for a, b in points) + '"/>')
        label = visible(str(dtype).removeprefix("torch."))
        parts.append(f'<text x="{frame.right + 4:g}" y="{float(y([flops])[0]) + 4:.1f}">{label}</text>')
    lines = [f"{'precision':10} {'batch':>5} {'operations/byte':>15} {'of the roof':>11}"]
    numbered = list(zip(speeds, reached))
    for (style, below), (_, group) in zip(STYLES.items(), groupby(numbered, key=lambda item: item[0].precision)):
        for speed, flops in group:
            left, top = float(x([speed.intensity])[0]), float(y([flops])[0])
            parts.append(
                f'<circle class="{style}" cx="{left:.1f}" cy="{top:.1f}" r="4"/>'
                f'<text class="{style}" x="{left + 7:.1f}" y="{top + below:.1f}">'
                f"{speed.precision}, {speed.batch}</text>"
            )
            dtype_peak = max(limits.flops.values()) if speed.precision != "float32" else min(limits.flops.values())
            roof = min(speed.intensity * limits.bandwidth, dtype_peak)
            lines.append(f"{speed.precision:10} {speed.batch:5} {speed.intensity:15.3g} {flops / roof:11.0%}")
    data = {
        "bandwidth": limits.bandwidth,
        "flops": {str(dtype).removeprefix("torch."): flops for dtype, flops in limits.flops.items()},
        "points": [
            {"precision": s.precision, "batch": s.batch, "intensity": s.intensity, "flops": f} for s, f in numbered
        ],
    }
    return Panel("", WIDTH, HEIGHT, f'<g class="plot">{"".join(parts)}</g>', lines, data)

"""Pictures as PDF: one page of the picture's size with its PNG at three pixels per SVG pixel, 288 per inch."""

import struct
import zlib
from collections.abc import Iterator

import numpy as np

ZOOM = 3
POINTS = 0.75  # PDF points per SVG pixel


def pdf_of(png: bytes, zoom: float = ZOOM) -> bytes:
    """Return a PDF of one page that shows a PNG with `zoom` pixels for each SVG pixel."""
    colors = rgb_of(png)
    height, width = colors.shape[:2]
    size = f"{width / zoom * POINTS:.2f} {height / zoom * POINTS:.2f}"
    across, down = size.split()
    drawn = f"q {across} 0 0 {down} 0 0 cm /Picture Do Q".encode()
    image = zlib.compress(colors.tobytes(), 9)
    form = f"/Type /XObject /Subtype /Image /Width {width} /Height {height} /ColorSpace /DeviceRGB /BitsPerComponent 8"
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {size}] /Contents 4 0 R /Resources << /XObject << /Picture 5 0 R "
        ">> >> >>".encode(),
        stream("", drawn),
        stream(f"{form} /Filter /FlateDecode", image),
    ]
    file, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(file))
        file += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    end = (
        f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\n"
    )
    return file + f"{end}startxref\n{len(file)}\n%%EOF\n".encode()


def stream(entries: str, content: bytes) -> bytes:
    return f"<< {entries} /Length {len(content)} >>\nstream\n".encode() + content + b"\nendstream"


def rgb_of(png: bytes) -> np.ndarray:
    """Return the colors (R, C, 3) of an opaque PNG in RGBA with 8 bits, as resvg writes it."""
    width, height, depth, kind = struct.unpack(">IIBB", png[16:26])
    assert (depth, kind) == (8, 6)
    lines = np.frombuffer(zlib.decompress(b"".join(data_of(png))), np.uint8).reshape(height, 1 + 4 * width)
    return unfiltered(lines[:, 0], lines[:, 1:].reshape(height, width, 4)[..., :3])


def data_of(png: bytes) -> Iterator[bytes]:
    at = 8
    while at < len(png):
        (length,), kind = struct.unpack(">I", png[at : at + 4]), png[at + 4 : at + 8]
        if kind == b"IDAT":
            yield png[at + 8 : at + 8 + length]
        at += length + 12


def unfiltered(filters: np.ndarray, raw: np.ndarray) -> np.ndarray:
    """Undo the filters of a PNG's lines: bytes (R, C, 3) were stored as differences from a prediction by the pixels to
    the left and above. The pixels of a diagonal do not depend on each other, so they are computed together."""
    rows, columns, _ = raw.shape
    skewed = np.zeros((rows + columns, rows + 1, 3), np.int16)  # indexed by diagonal and row
    row, column = np.arange(rows)[:, None], np.arange(columns)
    skewed[row + column + 1, row + 1] = raw
    out = np.zeros_like(skewed)
    kind = filters[:, None]
    is_left, is_above, is_mean, is_paeth = (kind == number for number in (1, 2, 3, 4))
    for diagonal in range(1, rows + columns):
        first, last = max(1, diagonal - columns + 1), min(diagonal, rows) + 1
        at, of = slice(first, last), slice(first - 1, last - 1)
        left, above = out[diagonal - 1, at], out[diagonal - 1, of]
        corner = out[diagonal - 2, of] if diagonal > 1 else np.zeros_like(left)
        a, b, c = abs(above - corner), abs(left - corner), abs(left + above - 2 * corner)
        paeth = np.where((a <= b) & (a <= c), left, np.where(b <= c, above, corner))
        predicted = left * is_left[of] + above * is_above[of] + (left + above) // 2 * is_mean[of] + paeth * is_paeth[of]
        out[diagonal, at] = (skewed[diagonal, at] + predicted) & 255
    return out[row + column + 1, row + 1].astype(np.uint8)

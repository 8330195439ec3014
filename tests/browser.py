"""A headless browser for the tests that look at pages, and what of a screenshot can be told without a library."""

from __future__ import annotations

import functools
import html
import json
import pathlib
import re
import shutil
import struct
import subprocess
import tempfile
import zlib
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --enable-logging=stderr --v=0 "
    "--disable-features=IsolateSandboxedIframes"  # else a picture may be taken before another process has drawn
).split()


@functools.cache
def found() -> str | None:
    """The path of a browser that starts, or None."""
    for name in _NAMES:
        path = shutil.which(name)
        if path is not None:
            try:
                if subprocess.run([path, "--version"], capture_output=True, timeout=30, check=False).returncode == 0:
                    return path
            except (OSError, subprocess.TimeoutExpired):
                continue
    return None


def run(file: pathlib.Path, *options: str) -> tuple[str, list[str]]:
    """What the browser prints, and the lines of its console (errors, refusals of the page's own policy)."""
    browser = found()
    assert browser is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [browser, *_FLAGS, f"--user-data-dir={profile}", *options, file.as_uri()]
        done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    return done.stdout.decode(), [
        line for line in done.stderr.decode(errors="replace").splitlines() if "CONSOLE" in line
    ]


def screenshot(file: pathlib.Path, *, width: int, height: int, dark: bool = False) -> tuple[pathlib.Path, list[str]]:
    """A picture beside the file, and the console."""
    picture = file.with_name(f"{file.stem}-{width}{'-dark' if dark else ''}.png")
    options = [f"--screenshot={picture}", f"--window-size={width},{height}"]
    _, console = run(file, *options, *(["--blink-settings=preferredColorScheme=0"] if dark else []))
    return picture, console


def rows(picture: pathlib.Path) -> list[bytes]:
    """The scan lines of a PNG as they are stored: a byte that says how, then the pixels."""
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, packed, width, height, channels = 8, b"", 0, 0, 3
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        chunk = data[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, color = struct.unpack(">IIBB", chunk[:10])
            assert (depth, color) in ((8, 2), (8, 6))
            channels = {2: 3, 6: 4}[color]
        packed += chunk if kind == b"IDAT" else b""
        at += 12 + length
    pixels = zlib.decompress(packed)
    stride = 1 + width * channels
    return [pixels[n * stride : (n + 1) * stride] for n in range(height)]


def background(picture: pathlib.Path) -> int:
    """The red of the first pixel: of the first line it is stored as it is."""
    return rows(picture)[0][1]


_MEASURE = """
<!DOCTYPE html><meta charset="utf-8"><style>iframe { border: 0; height: 900px } FOREIGN</style>
FRAMES
<pre id="measured"></pre>
<script>
addEventListener("load", () => {
  const frames = [...document.querySelectorAll("iframe")];
  document.getElementById("measured").textContent = JSON.stringify(frames.map(frame => {
    const page = frame.contentDocument, wide = page.documentElement.clientWidth;
    const inside = element => element.closest("pre, .scrolls, .trail code, .trail th div");
    return {
      width: wide,
      needs: page.documentElement.scrollWidth,
      over: [...page.body.querySelectorAll("*")].filter(
        element => !inside(element) && !(element instanceof page.defaultView.SVGElement)
          && element.getBoundingClientRect().right > wide + 1).map(element => element.outerHTML.slice(0, 80)),
      font: page.defaultView.getComputedStyle(page.body).fontSize,
      margin: page.defaultView.getComputedStyle(page.body).marginTop,
      advice: page.querySelector(".advice")?.getBoundingClientRect().bottom ?? 0,
      drawings: page.querySelectorAll("svg[role=img]").length,
      flat: [...page.querySelectorAll("svg[role=img]")].filter(
        drawing => drawing.checkVisibility() && !(drawing.getBoundingClientRect().width > 20)).length,
    };
  }));
});
</script>
"""


def measure(page: str, folder: pathlib.Path, *, widths: tuple[int, ...], foreign: str = "") -> list[dict[str, Any]]:
    """How a page comes out in frames of these widths (CSS pixels), under a document with `foreign` styles."""
    frames = "".join(
        f'<iframe sandbox="allow-same-origin" width="{width}" srcdoc="{html.escape(page)}"></iframe>'
        for width in widths
    )
    file = folder / "measure.html"
    text = _MEASURE.replace("FOREIGN", foreign).replace("FRAMES", frames)
    file.write_bytes(text.encode("utf-8", "backslashreplace"))
    printed, _ = run(file, "--window-size=1400,1000", "--virtual-time-budget=3000", "--dump-dom")
    told = re.search(r'<pre id="measured">(.+?)</pre>', printed, re.DOTALL)
    assert told, printed[-500:]
    measured: list[dict[str, Any]] = json.loads(html.unescape(told[1]))
    return measured

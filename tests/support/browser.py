"""Pages in one process of headless Chromium: what a reader would see wrong, at several widths, light and dark."""

import html
import json
import shutil
import subprocess
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--virtual-time-budget=20000"]
DARK = "@media (prefers-color-scheme: dark)"
POLICY = "default-src 'none'"
HEIGHT = 900

PROBE = Path(__file__).with_name("page_probe.js").read_text(encoding="utf-8")


def problems(pages, widths, folder):
    """Returns what is wrong: (page, width, scheme) -> sentences. Pages without a fault are left out.

    Args:
        pages: name -> its HTML.
        widths: of windows, in pixels; the first one is shown light and dark.
        folder: for the files and the profile of Chromium.
    """
    frames, views = [], [(width, "light") for width in widths] + [(widths[0], "dark")]
    for page, text in pages.items():
        assert DARK in text and POLICY in text
        for width, scheme in views:
            key = f"{page} {width} {scheme}"
            shown = text.replace(DARK, "@media all" if scheme == "dark" else "@media not all")
            shown = shown.replace(POLICY, f"{POLICY}; script-src 'unsafe-inline'")  # the page itself runs nothing
            file = folder / f"{key.replace(' ', '_')}.html"
            probe = f"<script>{PROBE.replace('name_of_page', json.dumps(key))}</script></body>"
            file.write_text(shown.replace("</body>", probe))
            frames.append(f'<iframe src="{file.name}" style="width:{width}px;height:{HEIGHT}px"></iframe>')
    script = "const found = []; onmessage = e => { found.push(e.data); out.textContent = JSON.stringify(found) }"
    start = folder / "all.html"
    start.write_text(
        f"<style>iframe {{ border: 0 }}</style><pre id=out></pre><script>{script}</script>{''.join(frames)}"
    )
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", f"file://{start}"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    results = json.loads(html.unescape(dom.split('<pre id="out">')[1].split("</pre>")[0]))
    assert sorted(f"{width}" for _, width, *_ in results) == sorted(str(w) for _ in pages for w, _ in views)
    assert all(num_texts > 10 for *_, num_texts in results)
    return {key: found for key, _, found, _ in results if found}

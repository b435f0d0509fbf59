"""Take the screenshots of README.md and docs/explorer.md in a real browser: `python docs/screenshots.py`.

Look at them afterwards: light, dark, narrow."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from playwright.sync_api import sync_playwright  # noqa: E402

from relpos.explorer import Library  # noqa: E402
from relpos.explorer.server import Running  # noqa: E402

# name -> width, height, colours, address: sources are the captures that ship, in the paper's order.
SHOTS = {
    "light": (1280, 900, "light", "#a=0&head=3&at=310,268&sort=window"),
    "dark": (1280, 1000, "dark", "#a=2&b=4&head=5&at=400,120"),
    "narrow": (390, 844, "light", "#a=7&head=3&at=300,250&zoom=240,290,20"),
}


def main() -> None:
    path = next(found for found in map(shutil.which, ("chromium", "google-chrome")) if found)
    with Running(Library()) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        for name, (width, height, scheme, address) in SHOTS.items():
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
            page.goto(url + address)
            page.wait_for_selector("html[data-ready]", state="attached")
            page.wait_for_timeout(500)
            out = ROOT / "docs" / "images" / f"explorer-{name}.png"
            page.screenshot(path=out, full_page=name == "narrow")
            print(out.relative_to(ROOT))
            page.close()
        browser.close()


if __name__ == "__main__":
    main()

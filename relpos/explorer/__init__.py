"""Look at position in a browser: `relpos explore`, one HTML file, or a widget in a notebook.

- `sources.py`: what a user names (a run, a capture, a model folder, an encoding, result files) -> captures;
- `wire.py`: a capture -> the bytes of its maps and profiles, in the capture format (docs/capture.md);
- `playground.py`: an encoding with its options and parameters moved;
- `server.py`: the small server (extra `[explorer]`), `export.py`: the same page as one file;
- `page/`: plain ES modules and canvas. The page reads maps and draws them; it knows no formula of any encoding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relpos.explorer.sources import Library

__all__ = ["Library", "Widget", "explore", "serve"]


class Widget:
    """A page for a notebook: the exported file inside a frame, so that it works with a remote kernel and in a saved
    notebook. `save` writes the file."""

    def __init__(self, page: str, height: int):
        self.page, self.height = page, height

    def save(self, path: str | Path) -> Path:
        from relpos.files import write_text

        return write_text(Path(path), self.page)

    def _repr_html_(self) -> str:
        import html

        return (
            f'<iframe title="relpos explorer" style="width:100%;height:{self.height}px;border:0" '
            f'srcdoc="{html.escape(self.page)}"></iframe>'
        )


def explore(
    *sources: Any,
    length: int | None = None,
    layers: str = "held",
    height: int = 760,
    playground: bool = True,
) -> Widget:
    """Show sources in a notebook: encodings, capture files, model folders, result files, `Capture` objects or models in
    memory; none shows what ships with relpos. `layers="all"` keeps every layer that can be drawn in the page."""
    from relpos.explorer.export import page

    library = Library(sources, length=length)
    return Widget(page(library, layers=layers, playground=playground), height)


def serve(sources: Any = (), **options: Any) -> None:
    """Serve the page until interrupted: `relpos.explorer.server.serve`."""
    from relpos.explorer.server import serve as run

    run(Library(sources, length=options.pop("length", None)), **options)

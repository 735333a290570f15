"""The files of the page. A request names an entry of this table; it is never part of a path."""

from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).parent / "page"
INDEX = "index.html"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


class PageFiles:
    def __init__(self, folder: Path = PAGE) -> None:
        files: Mapping[str, Path] = {
            file.name: file for file in sorted(folder.iterdir()) if file.suffix in CONTENT_TYPES and file.is_file()
        }
        self._by_address = {f"/{name}": file for name, file in files.items()}
        self._by_address["/"] = files[INDEX]

    def get(self, address: str) -> tuple[str, bytes] | None:
        """(content type, content), or None if there is no such file."""
        file = self._by_address.get(address)
        return None if file is None else (CONTENT_TYPES[file.suffix], file.read_bytes())

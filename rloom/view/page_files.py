"""The files of the page and the module with its Chinese texts. A request names an entry of this table, never a path."""

import json
from collections.abc import Mapping
from pathlib import Path

from rloom.language import FOLDER, read_catalogue

PAGE = Path(__file__).parent / "page"
INDEX = "index.html"
CHINESE, CATALOGUE = "/chinese.js", FOLDER / "page.txt"
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
        if address == CHINESE:
            texts = json.dumps(read_catalogue(CATALOGUE), ensure_ascii=False)
            return CONTENT_TYPES[".js"], f"export const CHINESE = {texts};\n".encode()
        file = self._by_address.get(address)
        return None if file is None else (CONTENT_TYPES[file.suffix], file.read_bytes())

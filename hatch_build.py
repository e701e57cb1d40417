"""Build hook: the description of the package is README.md without its relative links, which lead nowhere outside of the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ReadmeHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        """Set ``readme``, which pyproject.toml calls dynamic."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": without_relative_links(text)}


def without_relative_links(text: str) -> str:
    """Markdown without relative images, and with the words of relative links; anchors within the page stay."""
    text = re.sub(r"!\[[^\]]*\]\((?![a-z]+:)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]*)\]\((?![a-z]+:|#)[^)]*\)", r"\1", text)

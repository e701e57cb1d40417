"""Build hook: the description of the package is README.md with absolute links, which hold outside of the repository too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ReadmeHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        """Set ``readme``, which pyproject.toml calls dynamic."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": with_absolute_links(text, metadata["urls"]["Source"])}


def with_absolute_links(text: str, base: str) -> str:
    """Markdown whose links and images lead below ``base`` where they were relative; anchors within the page stay."""
    return re.sub(r"(\]\(|\bsrc=\")(?![a-z]+:|#|/)", lambda found: f"{found[1]}{base}/", text)

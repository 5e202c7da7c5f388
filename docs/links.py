"""A hook of MkDocs: links that leave docs/ lead to the repository, as they do on GitHub."""

from typing import Any


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    return markdown.replace("](../", f"]({config.extra['repository']}/blob/main/")

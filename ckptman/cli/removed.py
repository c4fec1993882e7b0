"""Options that earlier versions had, and what replaces each."""

from __future__ import annotations

REMOVED: dict[tuple[str, str], str] = {}
"""(verb, option) -> the rest of the sentence "OPTION was removed: ..."."""

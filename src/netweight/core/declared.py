"""Audits of each treatment, declared by registrations without imports and read by reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from netweight.errors import UsageError

# The audits of each treatment by name; None for one that an attack makes.
AUDITS: dict[str, dict[str, Any]] = {}


def declare_audits(treatment: str, audits: Mapping[str, Any]) -> None:
    """Name the audits that test a treatment; a `registry.Method` does so when it is made.

    Raises:
        UsageError: There is no audit, or the treatment was declared with others.
    """
    if not audits:
        raise UsageError(
            f"Treatment {treatment!r} has no audit.", cure="Every treatment needs an audit: name at least one."
        )
    if AUDITS.setdefault(treatment, dict(audits)) != audits:
        raise UsageError(f"Treatment {treatment!r} was declared with other audits.", cure="Declare it once.")

"""Defines the section that says what a run may do without keys."""

from __future__ import annotations

from megatron_opd.config.section import Section


class SecurityConfig(Section):
    """Says what a run may do without keys beyond this machine; docs/security.md says what has keys.

    What a run starts itself always has keys.
    """

    insecure: bool = False
    """Uses what has no key beyond this machine: servers at `urls`, or started by `opd serve`,
    without api_key_env, and a Ray cluster without token authentication. Whoever reaches these can
    change the student, read the data or run programs. false: they are refused."""

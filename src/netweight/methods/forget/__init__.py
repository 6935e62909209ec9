"""Forgetting: which prompts a diffusion model has memorized, in which neurons, and edits against it.

Read `settings`, `layers` (what a neuron is, and how active it usually is), `detect`, then `localize` with `search`,
then the edits: `edit` and `distil`. `images` and `report` show what an edit did,
`mitigations` are the methods compared with, `forget_folder` applies and audits edits of whole pipelines;
`netweight forget` calls `detect` and `localize` directly.
"""

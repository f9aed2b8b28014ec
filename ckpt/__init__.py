"""Checkpoints: which bytes a rank owns, the image they make, the log that commits them, and back.

Pure, torch-free files: region, placement, plan, image, manifest, entry, lineage, retention.
Only `registry`, `capture` and `apply` know torch. Imports `storage` and nothing else of ours.
"""

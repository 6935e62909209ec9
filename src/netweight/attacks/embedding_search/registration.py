"""The registration of `netweight attack embedding`; it imports nothing heavy."""

from typing import Any

from netweight.registry import Attack, lazy

_FOLDER = "netweight.attacks.embedding_search.attack_pipelines"

EMBEDDING: Attack[Any] = Attack(
    "embedding",
    lazy("netweight.attacks.embedding_search.settings:FolderSearch"),
    attack=lazy(f"{_FOLDER}:attack"),
    title="Search for embeddings",
    summary="Search for text embeddings that make an edited pipeline generate memorized images again.",
    description="MODEL is a folder of a diffusers pipeline, or its id on the hub. The same searches are made in the "
    "pipeline before its edit, and for images that no pipeline was trained on, which shows what the search generates "
    "by itself. OUT receives searches.jsonl, from which a second call continues, the embeddings and images of every "
    "search, and a report.",
    example="netweight attack embedding edited --base my-pipeline --targets targets.csv --out search",
    check=lazy(f"{_FOLDER}:check"),
    reads=lazy(f"{_FOLDER}:read_files"),
    tested=lazy("netweight.attacks.embedding_search.tested:tested"),
    preview=lazy(f"{_FOLDER}:preview"),
)

"""A reader of generated images, as a user brings one: mean colors."""

from netweight.methods.space.view.build import Reader

COLORS = Reader("mean colors", lambda images: dict(zip(("beard", "width"), images.mean((2, 3)).T, strict=False)))

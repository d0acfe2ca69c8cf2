"""Pictures as the terminal can show them: by kitty's protocol, as sixels, else as half blocks.

`textual_image` asks the terminal when it is imported, so that this module is loaded before the app
starts, which reads all input from then on.
"""

from __future__ import annotations

from typing import TypeAlias

from textual_image import _terminal

try:
    _terminal.get_cell_size()
except (ZeroDivisionError, ValueError):
    # The terminal has 0 columns, as where its size is not known, or answers with something else.
    # The sizes are those that textual_image assumes for a terminal that doesn't answer.
    setattr(_terminal.get_cell_size, "_result", _terminal.CellSize(10, 20))  # noqa: B010

from textual_image import renderable, widget

from ajet_sdk.errors import PictureError
from ajet_sdk.pictures import Picture
from ajet_tools.trace.episode.blocks import size_of

Drawing: TypeAlias = renderable.TGPImage | renderable.HalfcellImage
PictureWidget: TypeAlias = widget.TGPImage | widget.SixelImage | widget.HalfcellImage

INLINE: type[Drawing] = renderable.HalfcellImage
"""Drawn line by line, as a text is, so that it can be part of one. Sixels cannot."""
if renderable.Image is renderable.TGPImage:
    INLINE = renderable.TGPImage
ALONE: type[PictureWidget] = widget.HalfcellImage
"""Drawn in a place of its own. What is no terminal, such as a browser, shows half blocks."""
if renderable.Image is renderable.TGPImage:
    ALONE = widget.TGPImage
elif renderable.Image is renderable.SixelImage:
    ALONE = widget.SixelImage

_CELL = (12, 24)
"""Pixels that are sent for a cell of kitty's, which scales them to its own size."""


def drawing_of(picture: Picture, width: int) -> Drawing | None:
    """Draw a picture at most `width` columns wide; None if it was removed or cannot be read."""
    if not picture.data:
        return None
    columns, lines = size_of(picture, width)
    pixels = (columns, 2 * lines)
    if INLINE is renderable.TGPImage:
        pixels = (columns * _CELL[0], lines * _CELL[1])
    try:
        image = picture.image().resize(pixels)
    except PictureError:
        return None
    return INLINE(image, width=columns, height=lines)

"""Small pictures and chats about them, for end-to-end tests."""

import base64
import io
from typing import Any

import numpy as np
from PIL import Image


def picture(seed: int, width: int, height: int) -> Any:
    """A content part with a picture: waves of light whose lengths follow from the seed."""
    y, x = np.mgrid[:height, :width] / 10
    light = [np.sin(x * seed + c) * np.cos(y * (c + 1) / seed) for c in range(3)]
    values = np.uint8(127 + 127 * np.stack(light, axis=-1))
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def chat(*parts: Any) -> Any:
    """The messages of a chat that ends with a question about its parts."""
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]

"""Prompts as vLLM takes them: token ids, and the images that its processor puts where the ids mark their places.

The ids are sent as the chat template wrote them: one mark an image. vLLM (0.16 to 0.32) makes of it as many placeholders as the
image has states, and names the expanded ids in its output; expanded ids, sent in, would be taken for as many images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headstart.data.media import read
from headstart.types import Media


def prompt_of(request: Mapping[str, Any], model_config: Any) -> dict[str, Any]:
    """The prompt of a request {"ids", "media": [those of types.Media]}.

    Raises:
        GateError: an image is gone, or not the one that was hashed.
        ValueError: vLLM cannot decode it.
    """
    prompt: dict[str, Any] = {"prompt_token_ids": request["ids"]}
    if request.get("media"):
        prompt["multi_modal_data"] = _data([Media(**item) for item in request["media"]], model_config.hf_config)
    return prompt


def _data(media: Sequence[Media], hf_config: Any) -> dict[str, list[Any]]:
    """Decoded by vLLM's own loader, as it would for a chat. Kimi-K2.5 takes images as one kind of its `vision_chunk`."""
    from vllm.multimodal.media import ImageMediaIO  # noqa: PLC0415

    images = [ImageMediaIO().load_bytes(read(item)) for item in media]
    if getattr(hf_config, "use_unified_vision_chunk", False):
        return {"vision_chunk": [{"type": "image", "image": image.media, "uuid": None} for image in images]}
    return {"image": images}

"""A key/value cache whose rows can leave and enter, and that does not copy itself on every token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROOM = 128  # columns allocated ahead


def new_cache(model: PreTrainedModel) -> Cache:
    """An empty cache for `model`: ours when all its layers attend, Transformers' own when some are recurrent.

    Ours keeps what slides out of a window, so that a sequence can be rewound; masks hide it from attention.
    """
    own = DynamicCache(config=model.config)
    attends = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in own.layers)
    return GrowingCache() if attends else own


class GrowingLayer(DynamicLayer):
    """Keys and values [rows, heads, tokens, head_dim], views of buffers with room for more tokens."""

    _buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        del args, kwargs
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if self._buffers is None or self._buffers[0].shape[-2] < end:
            self._grow(key_states, value_states, end + max(_ROOM, end // 4))
        assert self._buffers is not None
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = states
        self._show(end)
        return self._held()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` columns (a negative number, as Transformers has it)."""
        self._show(self.get_seq_length() - abs(tokens_to_remove))

    def select(self, rows: Tensor, start: int) -> None:
        """Keep `rows` (int64) and the columns from `start`."""
        self._hold(*(held[rows, :, start:] for held in self._held()))

    def join(self, other: GrowingLayer) -> None:
        """Put the rows of `other` below these, right-aligned."""
        self._hold(*(_stack(mine, theirs) for mine, theirs in zip(self._held(), other._held(), strict=True)))

    def _held(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def _hold(self, keys: Tensor, values: Tensor) -> None:
        """Take these as they are; buffers with room come with the next `update`."""
        self.keys, self.values, self._buffers = keys, values, None

    def _grow(self, key_states: Tensor, value_states: Tensor, capacity: int) -> None:
        length = self.get_seq_length()
        keys, values = (new.new_empty(*new.shape[:2], capacity, new.shape[-1]) for new in (key_states, value_states))
        if length:
            keys[:, :, :length], values[:, :, :length] = self._held()
        self._buffers = keys, values

    def _show(self, length: int) -> None:
        assert self._buffers is not None
        self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)


class GrowingCache(Cache):
    """One `GrowingLayer` for each decoder layer, made as the layers come."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=GrowingLayer)

    def select(self, rows: Tensor, start: int) -> None:
        """Keep `rows` and the columns from `start`."""
        for layer in self._growing():
            layer.select(rows, start)

    def join(self, other: GrowingCache) -> None:
        """Append the rows of `other`, right-aligned; padding is zeros."""
        for mine, theirs in zip(self._growing(), other._growing(), strict=True):
            mine.join(theirs)

    def _growing(self) -> list[GrowingLayer]:
        assert all(isinstance(layer, GrowingLayer) for layer in self.layers)
        return self.layers  # pyright: ignore[reportReturnType]


def _stack(upper: Tensor, lower: Tensor) -> Tensor:
    """[rows, heads, tokens, d] below one another, ends aligned, with room for more tokens left to `update`."""
    width = max(upper.shape[-2], lower.shape[-2])
    stacked = upper.new_zeros(upper.shape[0] + lower.shape[0], upper.shape[1], width, upper.shape[-1])
    stacked[: upper.shape[0], :, width - upper.shape[-2] :] = upper
    stacked[upper.shape[0] :, :, width - lower.shape[-2] :] = lower
    return stacked

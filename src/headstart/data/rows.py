"""Rows of our own artifacts in Parquet: conversations, the token pool, samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import islice, pairwise, repeat
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headstart.types import Conversation, Media, Sample, Split

CONVERSATIONS = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("row", pa.int64()),
        ("split", pa.string()),
        ("messages", pa.string()),
    ]
)
POOL = pa.schema([("token", pa.int32()), ("count", pa.int64())])
SAMPLES = pa.schema(
    [
        ("id", pa.string()),
        ("conversation", pa.string()),
        ("source", pa.string()),
        ("split", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("supervised", pa.list_(pa.bool_())),
        ("finish", pa.string()),
    ]
)
SAMPLES_WITH_MEDIA = pa.schema([*SAMPLES, ("sent", pa.list_(pa.int32())), ("media", pa.string())])
_GROUP = 2048  # rows written together

T = TypeVar("T")


def write_conversations(path: Path, conversations: Iterable[Conversation]) -> None:
    """Write `conversations.parquet`, in the order given; messages as JSON."""
    _write(path, CONVERSATIONS, conversations, _conversation_row)


def read_conversations(path: Path, split: Split | None = None) -> list[Conversation]:
    """All conversations (of one split), in the order written."""
    return [_conversation(row) for row in _rows(path) if split in (None, row["split"])]


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Write `samples.parquet`, in the order given; with columns for images where a sample has some.

    Raises:
        ValueError: `input_ids` and `supervised` of a sample differ in length.
    """
    samples = list(samples)
    with_media = any(sample.media for sample in samples)
    _write(path, SAMPLES_WITH_MEDIA if with_media else SAMPLES, samples, _sample_row)


def read_samples(path: Path, split: Split | None = None) -> list[Sample]:
    """All samples (of one split), in the order written. The arrays are read-only views of the file's columns."""
    found: list[Sample] = []
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_GROUP):
            found.extend(sample for sample in _samples(batch) if split in (None, sample.split))
    return found


def write_pool(path: Path, counts: Mapping[int, int]) -> None:
    """Write `pool.parquet`: how often each token id occurs, by rising id."""
    ordered = sorted(counts.items())
    _write(path, POOL, ordered, lambda item: {"token": item[0], "count": item[1]})


def read_pool(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (int32 [n], rising) and their counts (int64 [n])."""
    table = pq.read_table(path)
    return table["token"].to_numpy(), table["count"].to_numpy()


def _write(path: Path, schema: pa.Schema, items: Iterable[T], row: Callable[[T], dict[str, Any]]) -> None:
    rest = iter(items)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        while rows := [row(item) for item in islice(rest, _GROUP)]:
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=schema))


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_GROUP):
            yield from batch.to_pylist()


def _conversation_row(conversation: Conversation) -> dict[str, Any]:
    return {
        "id": conversation.id,
        "source": conversation.source,
        "row": conversation.row,
        "split": conversation.split,
        "messages": json.dumps(conversation.messages, ensure_ascii=False),
    }


def _conversation(row: dict[str, Any]) -> Conversation:
    messages = tuple(json.loads(row["messages"]))
    return Conversation(row["id"], row["source"], row["row"], row["split"], messages)


def _sample_row(sample: Sample) -> dict[str, Any]:
    if len(sample.input_ids) != len(sample.supervised):
        raise ValueError(f"sample {sample.id}: {len(sample.input_ids)} ids, {len(sample.supervised)} mask entries")
    return {
        "id": sample.id,
        "conversation": sample.conversation,
        "source": sample.source,
        "split": sample.split,
        "input_ids": np.asarray(sample.input_ids, dtype=np.int32),
        "supervised": np.asarray(sample.supervised, dtype=np.bool_),
        "finish": sample.finish,
        "sent": None if sample.sent is None else np.asarray(sample.sent, dtype=np.int32),
        "media": json.dumps([asdict(item) for item in sample.media]) if sample.media else None,
    }


def _samples(batch: pa.RecordBatch) -> Iterator[Sample]:
    ids, supervised = _arrays(batch.column("input_ids")), _arrays(batch.column("supervised"))
    plain = batch.select(["id", "conversation", "source", "split", "finish"]).to_pylist()
    beside = _media(batch) if "media" in batch.schema.names else repeat({}, len(plain))
    for row, input_ids, mask, images in zip(plain, ids, supervised, beside, strict=True):
        yield Sample(input_ids=input_ids, supervised=mask, **row, **images)


def _media(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    for sent, media in zip(_arrays(batch.column("sent")), batch.column("media").to_pylist(), strict=True):
        yield {"sent": sent, "media": tuple(Media(**item) for item in json.loads(media))} if media else {}


def _arrays(column: pa.ListArray) -> Iterator[np.ndarray]:
    """One array per row, cut out of the column's values without a detour over Python numbers."""
    values = column.values.to_numpy(zero_copy_only=False)
    offsets = column.offsets.to_numpy()
    for start, end in pairwise(offsets):
        yield values[start:end]

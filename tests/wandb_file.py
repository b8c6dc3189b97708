"""Read an offline W&B run back from its file: wandb no longer ships a reader.

The file is a LevelDB log (https://github.com/google/leveldb/blob/main/doc/log_format.md) behind a header of 7 bytes:
blocks of 32 KiB, records split into chunks that are whole, first, middle or last. Each record is a protobuf Record.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

_BLOCK, _FILE_HEADER, _CHUNK_HEADER = 32 * 1024, 7, 7
_WHOLE, _FIRST, _LAST = 1, 2, 4


@dataclass
class RecordedRun:
    """What is on disk of one run."""

    alerts: list[Any] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None
    table: dict[str, Any] | None = None

    def metric(self, name: str) -> list[Any]:
        return [row[name] for row in self.rows if name in row]


def read_run(folder: Path) -> RecordedRun:
    """Read the only offline run below ``folder``."""
    (path,) = folder.rglob("*.wandb")
    run = RecordedRun()
    for record in _records(path.read_bytes()):
        kind = record.WhichOneof("record_type")
        if kind == "alert":
            run.alerts.append(record.alert)
        elif kind == "history":
            run.rows.append(_items(record.history.item))
        elif kind == "summary":
            run.summary.update(_items(record.summary.update))
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
    for table in path.parent.rglob("*.table.json"):
        run.table = json.loads(table.read_text())
    return run


def _items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def _records(data: bytes) -> Iterator[Any]:
    position, pending = _FILE_HEADER, b""
    while position + _CHUNK_HEADER <= len(data):
        left_in_block = _BLOCK - position % _BLOCK
        if left_in_block < _CHUNK_HEADER:
            position += left_in_block
            continue
        _checksum, length, kind = struct.unpack("<IHB", data[position : position + _CHUNK_HEADER])
        position += _CHUNK_HEADER
        chunk = data[position : position + length]
        position += length
        pending = chunk if kind in (_WHOLE, _FIRST) else pending + chunk
        if kind in (_WHOLE, _LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(pending)
            yield record

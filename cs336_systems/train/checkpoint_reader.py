"""Reads the files of torch.distributed.checkpoint as data: nothing that a file names is imported or called.

torch stores the index of a checkpoint, `.metadata`, as a pickle, and each tensor as a zip archive with a pickle of its
shape. A pickle is a program that may call any function; here it is read by `plain_pickle`, which keeps classes and
functions as names. `read_index` and `Reader` build tensors from it after checking every number against the sizes of the
files.
"""

import contextlib
import functools
import io
import math
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from cs336_systems.plain_pickle import PERSISTENT, Made, Name, load_plain
from cs336_systems.train.checkpoint_files import DamageError, opened

_DCP = "torch.distributed.checkpoint"
_STORAGES = {
    "torch.float64": "torch.DoubleStorage",
    "torch.float32": "torch.FloatStorage",
    "torch.float16": "torch.HalfStorage",
    "torch.bfloat16": "torch.BFloat16Storage",
    "torch.int64": "torch.LongStorage",
    "torch.int32": "torch.IntStorage",
    "torch.int16": "torch.ShortStorage",
    "torch.int8": "torch.CharStorage",
    "torch.uint8": "torch.ByteStorage",
    "torch.bool": "torch.BoolStorage",
}
"""The dtypes of tensors, and the names of their storages in a tensor's pickle."""
_INDEX_NAMES = {
    *(f"{_DCP}.metadata.{name}" for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "StorageMeta")),
    *(f"{_DCP}.metadata.{name}" for name in ("ChunkStorageMetadata", "MetadataIndex", "_MEM_FORMAT_ENCODING")),
    f"{_DCP}.filesystem._StorageInfo",
    *_STORAGES,
    "torch.Size",
    "torch.serialization._get_layout",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",  # Python 3.13
}
"""Classes and functions that `.metadata` may name."""
_TENSOR_NAMES = {"torch._utils._rebuild_tensor_v2", "collections.OrderedDict", PERSISTENT, *_STORAGES.values()}
"""Classes and functions that the pickle of a tensor may name."""

_MOST_DIMENSIONS = 16
_MOST_BYTES = 2**50
"""Maximum size or offset, such that products of them stay small integers."""
_TENSOR_PICKLE_BYTES = 2**16
_BLOCK = 2**23
"""Bytes read at a time."""


# -- pickles ----------------------------------------------------------------------------------------------------------


def _parse_pickle(data: bytes, names: set[str]) -> Any:
    """Return the value of a pickle that names nothing but `names`; raise DamageError for any other."""
    try:
        return load_plain(data, names)
    except ValueError as error:
        raise DamageError(f"its pickle cannot be read ({error})") from None


def _fields(value: Any, made_by: str) -> dict[str, Any]:
    """Return the attributes of an object of the class `made_by`."""
    if not isinstance(value, Made) or value.made_by != made_by:
        raise DamageError(f"it has something else in place of a {made_by.rpartition('.')[2]}")
    return _dictionary(value.state)


def _dictionary(value: Any) -> dict[str, Any]:
    """Return a dictionary that has strings as keys."""
    if type(value) is not dict or not all(type(key) is str for key in value):
        raise DamageError("it has something else in place of a dictionary")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST_BYTES:
        raise DamageError("it has a size or an offset that cannot be")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    """Return a tuple of sizes or offsets."""
    if type(value) is not tuple or len(value) > _MOST_DIMENSIONS:
        raise DamageError("it has something else in place of a shape")
    return tuple(_whole(size) for size in value)


def _size(value: Any) -> tuple[int, ...]:
    """Return the numbers of a torch.Size."""
    if not isinstance(value, Made) or value.made_by != "torch.Size" or len(value.arguments) != 1:
        raise DamageError("it has something else in place of a torch.Size")
    return _shape(value.arguments[0])


# -- the index --------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Location of a part of a tensor in the files."""

    file: str
    begin: int
    length: int


class Part(NamedTuple):
    """A range of a tensor's rows and columns, or the whole tensor."""

    place: Place
    shape: tuple[int, ...]
    dtype: torch.dtype


class Index(NamedTuple):
    """The tensors of a checkpoint, and their parts by the name of the tensor and the part's first position."""

    tensors: dict[str, TensorStorageMetadata]
    parts: dict[tuple[str, tuple[int, ...]], Part]

    def require(self, state: Mapping[str, Any]) -> None:
        """Raise DamageError unless every tensor of `state` is there, with its shape and dtype."""
        for name, tensor in state.items():
            found = self.tensors.get(name)
            if found is None:
                raise DamageError(f"{name} is not in it")
            expected, stored = (tuple(tensor.shape), tensor.dtype), (tuple(found.size), found.properties.dtype)
            if expected != stored:
                raise DamageError(f"{name} is {_described(*stored)} instead of {_described(*expected)}")


def _described(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {list(shape)}"


def read_index(data: bytes, sizes: Mapping[str, int]) -> Index:
    """Read the contents of `.metadata`; `sizes` are those of the files with tensors.

    Raise DamageError unless the parts of each tensor form a grid, as torch writes them for tensors that are whole or
    sharded by rows, columns or both, and every file consists of parts, one after another.
    """
    root = _fields(_parse_pickle(data, _INDEX_NAMES), f"{_DCP}.metadata.Metadata")
    tensors = {name: _tensor(value) for name, value in _dictionary(root.get("state_dict_metadata")).items()}
    stored = root.get("storage_data")
    if type(stored) is not dict:
        raise DamageError("it has no places of tensors")
    places = dict(_placed(key, value, sizes) for key, value in stored.items())
    if len(places) != len(stored):
        raise DamageError("it names a part of a tensor twice")
    parts = {}
    for name, tensor in tensors.items():
        for chunk in tensor.chunks:
            key = name, tuple(chunk.offsets)
            if key not in places:
                raise DamageError(f"it does not say where {name} is")
            parts[key] = Part(places.pop(key), tuple(chunk.sizes), tensor.properties.dtype)
    if places:
        raise DamageError("it has places of unknown tensors")
    spans: dict[str, list[tuple[int, int]]] = {file: [] for file in sizes}
    for part in parts.values():
        spans[part.place.file].append((part.place.begin, part.place.length))
    for file, size in sizes.items():
        _require_consecutive(spans[file], size, file)
    return Index(tensors, parts)


def _tensor(value: Any) -> TensorStorageMetadata:
    fields = _fields(value, f"{_DCP}.metadata.TensorStorageMetadata")
    properties, size, chunks = fields.get("properties"), _size(fields.get("size")), fields.get("chunks")
    if not isinstance(properties, Made) or properties.made_by != f"{_DCP}.metadata.TensorProperties":
        raise DamageError("it has something else in place of TensorProperties")
    dtype = properties.state[0] if type(properties.state) is tuple and properties.state else None
    if not isinstance(dtype, Name) or dtype not in _STORAGES or type(chunks) is not list:
        raise DamageError("it has something else in place of a tensor's properties")
    found = [_fields(chunk, f"{_DCP}.metadata.ChunkStorageMetadata") for chunk in chunks]
    pairs = [(_size(chunk.get("offsets")), _size(chunk.get("sizes"))) for chunk in found]
    if not size and pairs != [((), ())]:
        raise DamageError("it has parts of a single number")
    if size:
        require_grid(pairs, size)
    return TensorStorageMetadata(
        TensorProperties(dtype=getattr(torch, dtype.removeprefix("torch."))),
        torch.Size(size),
        [ChunkStorageMetadata(torch.Size(begin), torch.Size(part)) for begin, part in pairs],
    )


def _placed(key: Any, value: Any, sizes: Mapping[str, int]) -> tuple[tuple[str, tuple[int, ...]], Place]:
    """Return the name and first position of a part, and its location."""
    index, info = _fields(key, f"{_DCP}.metadata.MetadataIndex"), _fields(value, f"{_DCP}.filesystem._StorageInfo")
    name, file = index.get("fqn"), info.get("relative_path")
    if type(name) is not str or type(file) is not str or file not in sizes:
        raise DamageError("it names a file that is not there")
    if info.get("transform_descriptors") is not None:
        raise DamageError("its tensors are transformed")
    return (name, _size(index.get("offset"))), Place(file, _whole(info.get("offset")), _whole(info.get("length")))


def require_grid(parts: list[tuple[tuple[int, ...], tuple[int, ...]]], size: tuple[int, ...]) -> None:
    """Raise DamageError unless the parts, of first position and shape, form a grid that covers the tensor once."""
    if any(len(begin) != len(size) or len(shape) != len(size) for begin, shape in parts):
        raise DamageError("it has parts of another number of dimensions than their tensor")
    spans = [{(begin[d], shape[d]) for begin, shape in parts} for d in range(len(size))]
    for along, end in zip(spans, size, strict=True):
        _require_consecutive(list(along), end, "a tensor")
    if not len(set(parts)) == len(parts) == math.prod(map(len, spans)):
        raise DamageError("it has parts that do not form a grid")


def _require_consecutive(spans: list[tuple[int, int]], end: int, what: str) -> None:
    """Raise DamageError unless the spans, of begin and length, cover 0 to `end` once."""
    position = 0
    for begin, length in sorted(spans):
        if begin != position:
            raise DamageError(f"it has a gap or an overlap in {what}")
        position += length
    if position != end:
        raise DamageError(f"it does not describe all of {what}")


# -- tensors ----------------------------------------------------------------------------------------------------------


class _Slice(io.RawIOBase):
    """A range of a file, as a file. A read never requests more bytes than the range has."""

    def __init__(self, file: IO[bytes], place: Place):
        self._file, self._begin, self._length, self._position = file, place.begin, place.length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise OSError("position before the start")
        self._position = start + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._position)
        self._file.seek(self._begin + self._position)
        data = self._file.read(left if size < 0 else min(size, left))
        self._position += len(data)
        return data


@contextlib.contextmanager
def _stored(file: IO[bytes], part: Part) -> Iterator[tuple[IO[bytes], tuple[int, ...]]]:
    """Open the bytes of a tensor that torch.save has written into a range of `file`; yield them and the strides.

    The archive is not compressed, so its contents cannot be larger than the file. zipfile compares their CRC-32 when
    the last byte is read.
    """
    try:
        with zipfile.ZipFile(_Slice(file, part.place)) as archive:
            members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if any(info.compress_type != zipfile.ZIP_STORED for info in members.values()):
                raise DamageError("it is compressed")
            pickled, values = members["data.pkl"], members["data/0"]
            if pickled.file_size > _TENSOR_PICKLE_BYTES:
                raise DamageError("the description of a tensor is too long")
            if archive.read(members["byteorder"]) != sys.byteorder.encode():
                raise DamageError(f"its numbers are not {sys.byteorder}-endian")
            strides = _strides(archive.read(pickled), part.shape, part.dtype)
            if values.file_size != math.prod(part.shape) * part.dtype.itemsize:
                raise DamageError("a tensor has another number of bytes than its shape")
            with archive.open(values) as stream:
                yield stream, strides
    except (zipfile.BadZipFile, KeyError, ValueError, RuntimeError, EOFError) as error:
        raise DamageError(f"a tensor in it cannot be read ({error})") from None


@functools.lru_cache(maxsize=256)
def _strides(pickled: bytes, wanted: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Return the strides of a tensor, whose pickle must describe one of this shape and dtype, stored without gaps.
    Equal pickles, which most tensors of a model have, are parsed once."""
    tensor = _parse_pickle(pickled, _TENSOR_NAMES)
    storage = ("storage", _STORAGES[str(dtype)], "0", "cpu", math.prod(wanted))
    is_tensor = isinstance(tensor, Made) and tensor.made_by == "torch._utils._rebuild_tensor_v2"
    arguments = tensor.arguments if is_tensor and type(tensor.arguments) is tuple else ()
    if len(arguments) != 6 or not isinstance(arguments[0], Made) or arguments[0].made_by != PERSISTENT:
        raise DamageError("something in it is no tensor")
    shape, strides = _shape(arguments[2]), _shape(arguments[3])
    if (arguments[0].arguments, arguments[1], shape) != (storage, 0, wanted) or len(strides) != len(shape):
        raise DamageError("a tensor in it differs from its description")
    step = 1
    for stride, size in sorted(pair for pair in zip(strides, shape, strict=True) if pair[1] != 1):
        if stride != step and 0 not in shape:
            raise DamageError("a tensor in it has gaps or overlaps")
        step *= size
    return strides


def check_parts(path: Path, index: Index, file_name: str) -> None:
    """Read every tensor of a file, and raise DamageError unless it is as `index` says and its checksum holds."""
    with opened(path / file_name) as file:
        for part in index.parts.values():
            if part.place.file == file_name:
                with _stored(file, part) as (stream, _):
                    while stream.read(_BLOCK):
                        pass


def _read_tensor(file: IO[bytes], part: Part) -> Tensor:
    with _stored(file, part) as (stream, strides):
        buffer = torch.empty(math.prod(part.shape) * part.dtype.itemsize, dtype=torch.uint8)
        view, position = buffer.numpy().data, 0
        while block := stream.read(_BLOCK):
            view[position : position + len(block)] = block
            position += len(block)
    return buffer.view(part.dtype).as_strided(part.shape, strides)


class Reader(FileSystemReader):
    """Reads tensors for torch.distributed.checkpoint.load."""

    def __init__(self, path: Path, index: Index):
        super().__init__(path)
        self._folder, self._index = path, index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            dict(self._index.tensors),
            storage_data={MetadataIndex(*key): part.place for key, part in self._index.parts.items()},
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[ReadItem, Part]]] = {}
        for item in plan.items:
            if item.type != LoadItemType.TENSOR:
                raise DamageError("something in it is no tensor")
            part = self._index.parts[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
            by_file.setdefault(part.place.file, []).append((item, part))
        for name, items in by_file.items():
            with opened(self._folder / name) as file:
                for item, part in items:
                    values = _read_tensor(file, part)
                    for dimension, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                        values = values.narrow(dimension, begin, length)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(values)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

"""Where an output goes, and what it must not replace: files that the merge reads, and files of no model.

Paths are compared by what they lead to (device and file number), so that symbolic links, hard links and other
spellings of a path are seen through.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cost_mtl.merging.checkpoint import INDEX_SUFFIX, VECTOR_KIND, CheckpointSource

__all__ = ["Destination"]

_Identity = tuple[int, int]

_MODEL_FILES = frozenset(
    [
        "config.json",
        "generation_config.json",
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "tokenizer.model",
        "spiece.model",
        "sentencepiece.bpe.model",
        "chat_template.json",
        "chat_template.jinja",
    ]
)
"""What transformers writes beside the weights; any other file is not part of a model."""


@dataclass(frozen=True)
class Destination:
    """A path to write to, and the checks that it must pass before the work and again before the output is put there.

    Attributes:
        path: a file or a folder. A symbolic link is followed.
        overwrite: whether an earlier output may be replaced.
        inputs: files and folders that are read; neither they nor what is in them is replaced, and nothing is written
            into these folders.
        companions: files that go beside the weights: name -> what gives their content.
        vector: whether a task vector is written; neither a model nor a task vector replaces the other.
    """

    path: Path
    overwrite: bool = False
    inputs: frozenset[Path] = frozenset()
    companions: Mapping[str, Callable[[], bytes]] = field(default_factory=dict)
    vector: bool = False

    def check(self) -> None:
        """Looks at what is there now.

        Raises:
            FileExistsError: something is there, and ``overwrite`` is False.
            FileNotFoundError: the folder to write into does not exist.
            ValueError: the path is, lies in, or holds an input; or it is no earlier output and no other model.
        """
        path = Path(os.path.realpath(self.path))  # unlike resolve(), it bears a loop of links
        if path.exists() and not self.overwrite and not _is_empty_folder(path):
            raise FileExistsError(
                f"out: expected a path that does not exist, got {self.path}: choose another one, or allow replacing it "
                "(overwrite=True, --overwrite)"
            )
        if not path.parent.is_dir():
            raise FileNotFoundError(f"out: expected an existing folder, got {path.parent}")
        _check_apart(self.path, path, self.inputs)
        if path.exists() and not _is_empty_folder(path):
            self._check_is_a_model(path)

    def _check_is_a_model(self, path: Path) -> None:
        if path.is_dir():
            foreign = sorted(file.name for file in path.iterdir() if not self._is_known(file))
            if foreign:
                raise ValueError(
                    f"out: expected a folder that holds nothing but a model, got {self.path} with {foreign[0]!r} "
                    f"({len(foreign)} such files and folders): choose another path, or move them away"
                )
        try:
            there = CheckpointSource(path, "out")
        except (ValueError, OSError) as error:
            raise ValueError(f"out: expected a model to replace, got {self.path} ({error}): remove it first") from error
        if (there.metadata.get("kind") == VECTOR_KIND) != self.vector:
            kinds = ("a task vector", "a model") if self.vector else ("a model", "a task vector")
            raise ValueError(
                f"out: expected {kinds[0]} to replace, got {self.path}, which is {kinds[1]}: choose another path"
            )

    def _is_known(self, file: Path) -> bool:
        if not file.is_file():
            return False
        if file.name in _MODEL_FILES or file.name.endswith((".safetensors", INDEX_SUFFIX)):
            return True
        return file.name in self.companions and file.read_bytes() == self.companions[file.name]()


def _check_apart(given: Path, path: Path, inputs: Iterable[Path]) -> None:
    own = _identity(path)
    around = set(_lineage(path))
    inside = {_identity(file): file for file in path.iterdir()} if path.is_dir() else {}
    for source in sorted(inputs):
        there = _identity(source)
        if there is None:
            continue
        if there == own:
            raise ValueError(f"out: expected another path, got {given}: it is {source}, which is read")
        if there in around:
            raise ValueError(f"out: expected another path, got {given}: it lies inside {source}, which is read")
        if own is not None and own in {*_lineage(source), *_lineage(source.resolve())}:
            raise ValueError(f"out: expected another path, got {given}: it holds {source}, which is read")
        for file in source.iterdir() if source.is_dir() else (source,):
            if _identity(file) in inside:
                link = inside[_identity(file)].name
                raise ValueError(f"out: expected another path, got {given}: its {link!r} is {file}, which is read")


def _identity(path: Path) -> _Identity | None:
    """What a path leads to; None where there is nothing."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def _lineage(path: Path) -> Iterator[_Identity]:
    """The folders that a path lies in, as it is spelled."""
    for parent in Path(os.path.abspath(path)).parents:
        identity = _identity(parent)
        if identity is not None:
            yield identity


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())

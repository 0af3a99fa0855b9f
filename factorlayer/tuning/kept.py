"""Choices as files: one each in the cache's folder, beside the kernels, and all of them in one to be shipped.

A file is JSON, {"factorlayer choices": 1, "choices": [...]}. It is written whole or not at all, and read strictly: what
is not as it was written is damaged, and counts for nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import stat
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from factorlayer.autograd.layer_ops import DTYPES, missing_extension
from factorlayer.autograd.runtime import dtype_name
from factorlayer.kernels.batches import class_of
from factorlayer.maths.chain import MOST_TEXT, parse_layers
from factorlayer.tuning.choices import TABLE, Choice, Place, folder, load, put, warn_once

HEAD, VERSION = "factorlayer choices", 1
LARGEST_FILE = 1 << 26  # bytes that are read
MOST_SAMPLES = 10**18
HOUR = 3600  # after which a draft is a killed process's


def keep(choices: Sequence[Choice]) -> None:
    """Puts choices into the table and into the folder. If the folder cannot be written, they last as long as this
    process."""
    where = folder()
    try:
        if where is None:
            raise OSError("there is no home folder")
        where.mkdir(parents=True, exist_ok=True)
        _remove_drafts(where)
        for choice in choices:
            name = json.dumps([choice.key, asdict(choice.place)])
            _write(where / f"{hashlib.sha256(name.encode()).hexdigest()[:40]}.json", [choice])
    except OSError as error:
        warn_once(
            f"factorlayer cannot keep choices in {where or 'its cache'} ({error.strerror or error}), so they last as "
            "long as this process; set FACTORLAYER_CACHE to a folder that can be written"
        )
    put(list(choices))


def export_choices(path: str | Path) -> int:
    """Writes all choices that are known here into a file, to be imported elsewhere. Returns how many."""
    load()
    choices = [choice for places in TABLE.values() for choice in places.values()]
    if not choices:
        raise ValueError("export_choices: there should be choices to export, none was measured; tune a layer before")
    _write(Path(path), choices)
    return len(choices)


def import_choices(path: str | Path) -> int:
    """Keeps the choices of a file, and returns how many. Those of other machines are kept as well, and ignored on this
    one."""
    load()
    try:
        choices = _read(Path(path))
    except OSError as error:
        raise ValueError(f"import_choices: {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(
            f"import_choices: {path} should be a file that export_choices wrote, unchanged; {error}"
        ) from None
    keep(choices)
    return len(choices)


def read_kept() -> None:
    """Reads what the folder holds into the table."""
    where = folder()
    if where is None or missing_extension is not None:
        return
    try:
        names = sorted(name for name in os.listdir(where) if name.endswith(".json"))
    except OSError:
        return  # nobody has tuned
    found: list[Choice] = []
    damaged: list[str] = []
    for name in names:
        try:
            found += _read(where / name)
        except FileNotFoundError:  # somebody else has removed it
            continue
        except (OSError, ValueError) as error:
            damaged.append(f"{name} ({error})")
    if damaged:
        warn_once(
            f"factorlayer ignores {len(damaged)} of {len(names)} kept choices, whose files in {where} are damaged: "
            f"{damaged[0]}{', …' if len(damaged) > 1 else ''}; remove them and tune those layers again"
        )
    put(found)


def _remove_drafts(where: Path) -> None:
    for draft in where.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - draft.stat().st_mtime > HOUR:
                draft.unlink()


def _write(path: Path, choices: Sequence[Choice]) -> None:
    """Writes choices into a draft, which is moved to `path` once it is whole."""
    text = json.dumps({HEAD: VERSION, "choices": [asdict(choice) for choice in choices]}, indent=1)
    file, draft = tempfile.mkstemp(suffix=".tmp", prefix=".", dir=path.parent)
    try:
        with os.fdopen(file, "w") as stream:
            stream.write(text + "\n")
            stream.flush()
            os.fchmod(stream.fileno(), 0o644)
            os.fsync(stream.fileno())
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def _read(path: Path) -> list[Choice]:
    """The choices of a file. Raises ValueError if it is no file of choices."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:  # a pipe would make it wait
        known = os.fstat(stream.fileno())
        if not stat.S_ISREG(known.st_mode) or known.st_size > LARGEST_FILE:
            raise ValueError(f"it is no file of at most {LARGEST_FILE} bytes")
        text = stream.read(LARGEST_FILE)
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON: {error}") from None
    if not isinstance(told, dict) or set(told) != {HEAD, "choices"} or told[HEAD] != VERSION:
        raise ValueError(f'it should hold "{HEAD}": {VERSION}, and "choices"')
    if not isinstance(told["choices"], list):
        raise ValueError('"choices" should be a list')
    return [_choice_of(each) for each in told["choices"]]


def _choice_of(told: Any) -> Choice:
    place = _fields_of(Place, told.get("place") if isinstance(told, dict) else None, "place")
    if not all(isinstance(word, str) and len(word) <= 1000 and word.isprintable() for word in place.values()):
        raise ValueError("a place should be described in words of one line")
    given = _fields_of(Choice, told, "choice") | {"place": Place(**place)}
    text, dtype, batch_class, samples = (given[name] for name in ("text", "dtype", "batch_class", "samples"))
    if not isinstance(text, str) or len(text) > MOST_TEXT:
        raise ValueError("a choice's text should be a chain's or a stack's")
    parse_layers(text)
    if dtype not in map(dtype_name, DTYPES):
        raise ValueError(f"a choice's dtype should be one of {', '.join(map(dtype_name, DTYPES))}")
    if type(samples) is not int or not 0 < samples <= MOST_SAMPLES or not isinstance(given["training"], bool):
        raise ValueError("samples should be a positive number, and training true or false")
    if type(batch_class) is not int or batch_class != class_of(samples):
        raise ValueError("a class of batch should be that of the samples")
    for name in ("fused_us", "batched_us"):
        if type(given[name]) not in (int, float) or not 0 < given[name] < math.inf:
            raise ValueError(f"{name} should be a positive number of microseconds")
        given[name] = float(given[name])
    return Choice(**given)


def _fields_of(kind: type, told: Any, what: str) -> dict[str, Any]:
    names = [field.name for field in fields(kind)]
    if not isinstance(told, dict) or sorted(told) != sorted(names):
        raise ValueError(f"a {what} should have {', '.join(names)}, and nothing else")
    return dict(told)

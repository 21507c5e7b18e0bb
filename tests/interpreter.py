"""Removes overhead from Triton's interpreter, in which most kernel tests spend their time."""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any

VERSION = "3.9."
"""Triton version whose internals are patched; other versions run unpatched."""


def quicken() -> None:
    """Patches the interpreter once it is imported; results do not change."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or hasattr(interpreter, "is_quick"):
        return
    interpreter.is_quick = True
    if not interpreter.triton.__version__.startswith(VERSION):
        return
    _patch_once_a_launch(interpreter)
    _keep_numpy_types(interpreter)
    _keep_shapes(interpreter.tl.core)
    # Overflows are computed for each sum of integers, and then looked at while debugging only.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)


def _patch_once_a_launch(interpreter: Any) -> None:
    """Quicken launches. A launch replaces the language's functions. Each function that a kernel
    calls would look for all of them once more, find them replaced, and have used a third of the
    time.
    """
    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    languages = (interpreter.tl, interpreter.tl.core)
    patched: set[str] = set()

    @functools.cache
    def languages_of(function: Any) -> set[str]:
        values = function.__globals__.values()
        return {one.__name__ for one in languages if any(one is value for value in values)}

    def launch_anew(*args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(*args, **kwargs)

    def patch_once(function: Any) -> Any:
        wanted = languages_of(function)
        if wanted and wanted <= patched:
            return None
        patched.update(wanted)
        return patch(function)

    interpreter.GridExecutor.__call__ = launch_anew
    interpreter._patch_lang = patch_once


def _keep_numpy_types(interpreter: Any) -> None:
    """They are looked up for each operation, in a table that is made for it."""
    find = interpreter._get_np_dtype
    found: dict[str, Any] = {}

    def find_once(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in found:
            found[name] = find(kind.scalar)
        return found[name]

    interpreter._get_np_dtype = find_once


def _keep_shapes(core: Any) -> None:
    """Each tensor and its type wrap all sizes of their shape, as constants with types."""
    describe = core.block_type.__init__
    known: dict[Any, dict[str, Any]] = {}
    in_tensors: dict[Any, tuple[Any, Any]] = {}

    def describe_once(kind: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(int(getattr(size, "value", size)) for size in shape))
        if key not in known:
            describe(kind, element_ty, shape)
            known[key] = dict(kind.__dict__)
        kind.__dict__.update(known[key], element_ty=element_ty)

    def begin(tensor: Any, handle: Any, type: Any) -> None:  # noqa: A002
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        shape = type.shape.values if type.is_block() else ()
        key = (*shape,)
        if key not in in_tensors:
            sizes = core.tuple([core.constexpr(size) for size in shape])
            in_tensors[key] = sizes, core.constexpr(type.numel if shape else 1)
        tensor.shape, tensor.numel = in_tensors[key]

    core.block_type.__init__ = describe_once
    core.tensor.__init__ = begin

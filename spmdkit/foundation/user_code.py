"""User code: imports the objects that a config names, and calls functions so that errors report the user's line.

A config may name only registered objects: `task: os:system` must not run a command. A function has to be registered
(`@sk.task`, `@sk.hook`, `@sk.reducer`, `@sk.sync`, `@sk.tracker`, `@sk.weights`) in the module that the config names;
otherwise the name has to be an object of that kind.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import cloudpickle
import jax

from spmdkit import compat
from spmdkit.compat.user_mesh import mesh_in_context
from spmdkit.errors import ConfigError, SpmdkitError, UserCodeError
from spmdkit.foundation.formatting import nearest

T = TypeVar("T")

KEYS = {"task": "task", "hook": "hooks", "reducer": "reducer", "sync": "sync", "tracker": "log.trackers"}
KEYS |= {"weights": "init_from.names", "samples": "hooks"}
"""Kind of registered function -> the key in a config."""

RETURNS = {"task": "a `Task`", "weights": "pairs (pattern of a name in the source, path of a leaf)"}
RETURNS |= {"samples": "{name: text or array}, from the arguments (program, state)"}
RETURNS |= {kind: f"a `{kind.capitalize()}`" for kind in KEYS if kind not in RETURNS}
"""Kind of registered function -> what it returns."""

_MARK = "__spmdkit_declared__"
_LOADED_AS = "spmdkit_task_"

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGED = re.compile(r"[/\\](?:site|dist)-packages[/\\](\w+)")
_REFUSING = {name: name for name in ("numpy", "flax", "equinox", "optax", "einops")}
_REFUSING |= {"jax": "JAX", "jaxlib": "JAX", "opt_einsum": "einsum"}
"""Model libraries. Their errors mean that shapes, dtypes or names do not match."""

_LONGEST_CAUSE = 500


def line_of(function: Callable[..., Any]) -> str:
    """Returns ` at FILE:LINE` of the definition of a function, or an empty text."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f" at {code.co_filename}:{code.co_firstlineno}"


def call_user(fn: Callable[[], T], what: str, is_model: bool = True) -> T:
    """Returns `fn()`, which runs or traces a user's function; `what` names it.

    Raises:
        ConfigError: JAX, a model library or spmdkit rejects an operation of a model (shapes, dtypes, branches).
        UserCodeError: the function raised; `__cause__` has its frames.
    """
    try:
        with compat.whole_tracebacks(), mesh_in_context(None):
            return fn()
    except ConfigError as error:
        frame = user_frame(error)
        if frame is None:
            raise
        raise ConfigError(f"{error}{_shown(frame)}") from error
    except SpmdkitError:
        raise
    except (Exception, SystemExit, GeneratorExit) as error:
        frame = user_frame(error)
        where = f" at {frame.filename}:{frame.lineno}" if frame else ""
        library = _refused_by(error) if frame and is_model else None
        if frame is None or library is None:
            repair = f"\n{_repair(error, what)}" if isinstance(error, jax.errors.JAXTypeError) and not is_model else ""
            text = f"{shortened(error)}{_known_keys(error)}{repair}"
            raise UserCodeError(f"{what} raised {type(error).__name__}{where}: {text}") from error
        if library == "spmdkit":
            raise ConfigError(f"{what}: {shortened(error)}{_shown(frame)}") from error
        raise ConfigError(
            f"{what} cannot be traced: {library} raised {type(error).__name__}: "
            f"{shortened(error)}{_shown(frame)}\n{_repair(error, what)}"
        ) from error


def calling_line() -> str:
    """Returns the user's line that is being executed, as it is shown after a message; empty if there is none."""
    frames = [f for f in traceback.extract_stack() if not _is_library(f.filename)]
    return _shown(frames[-1]) if frames else ""


def shown_line(error: BaseException | None) -> str:
    """Returns the user's line that raised, as it is shown after a message; empty if there is none."""
    frame = None if error is None else user_frame(error)
    return "" if frame is None else _shown(frame)


def _shown(frame: traceback.FrameSummary) -> str:
    return f"\n  {frame.filename}:{frame.lineno}: {frame.line}".rstrip(": ")


def shortened(error: BaseException) -> str:
    """Returns the first paragraph of an exception's text, without JAX's notes about internal files and types."""
    first, *more = re.sub(r"\{V:[^}]*\}", "", str(error)).strip().split("\n\n")
    text = f"{first}\n{more[0]}" if more and first.endswith(":") else first
    notes = ("The error occurred while tracing", "See https:")
    text = "\n".join(line for line in text.splitlines() if not line.startswith(notes)) or "it gave no reason"
    return text if len(text) <= _LONGEST_CAUSE else f"{text[:_LONGEST_CAUSE]} ..."


def _known_keys(error: BaseException) -> str:
    """Returns a sentence with the keys of the mapping that lacks the key of a KeyError; empty if it is not known."""
    if not isinstance(error, KeyError) or len(error.args) != 1:
        return ""
    frames = zip(traceback.walk_tb(error.__traceback__), traceback.extract_tb(error.__traceback__), strict=True)
    users = [(frame, summary) for (frame, _), summary in frames if not _is_library(summary.filename)]
    if not users:
        return ""
    frame, at = users[-1]
    line = linecache.getline(at.filename, at.lineno or 0).encode()[at.colno or 0 :]
    words = set(re.findall(r"\w+", line[: line.find(b"[") + 1].decode(errors="replace")))
    return "".join(
        f". {name} has the keys {', '.join(map(repr, list(value)[:12]))}"
        for name, value in frame.f_locals.items()
        if name in words and isinstance(value, Mapping) and value and error.args[0] not in value
    )


def _refused_by(error: BaseException) -> str | None:
    """Returns the library of the frame that raised, or None for user code."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    if last.startswith(_PACKAGE):
        return "spmdkit"
    match = _PACKAGED.search(last)
    return _REFUSING.get(match[1]) if match else None


def _repair(error: BaseException, what: str) -> str:
    if isinstance(error, jax.errors.JAXTypeError | jax.errors.JAXIndexError):
        return (
            f"While {what} is compiled its arrays have shapes and no values. Use jnp.where or jax.lax.cond for `if`, "
            "and jnp for np, float() and int()."
        )
    if isinstance(error, NameError) and "unbound axis name" in str(error):
        return "The replica axes are named 'replica' and 'data'. Write axis_name=('replica', 'data')."
    computed = "The parameters, the data and what is computed from them"
    return f"{'The shapes and dtypes in it' if what == 'init' else computed} have to fit together. Fix that line."


def user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Returns the innermost frame that belongs neither to spmdkit nor to an installed package."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_library(f.filename)]
    return frames[-1] if frames else None


def _is_library(filename: str) -> bool:
    return filename.startswith((_PACKAGE, _STDLIB, "<")) or _PACKAGED.search(filename) is not None


# ---- what a config names ---------------------------------------------------------------------------------------------


def declared(kind: str) -> Callable[[T], T]:
    """Returns the decorator that registers a function as a `kind`. A config can name it in the module that registers
    it."""

    def declare(fn: T) -> T:
        module = sys._getframe(1).f_globals.get("__name__", "")
        try:
            assert callable(fn)
            setattr(fn, _MARK, (kind, module))
        except (AssertionError, AttributeError, TypeError):
            raise ConfigError(
                f"@sk.{kind} received {_described(fn)}. It registers a function. Write it above `def make(...):`."
            ) from None
        return fn

    declare.__name__ = kind
    declare.__doc__ = (
        f"Registers a function that returns {RETURNS[kind]}, so that `{KEYS[kind]}` of a config can name it. Options "
        "of the config are its keyword arguments."
    )
    return declare


task, hook, reducer, sync, tracker, weights, samples = map(declared, KEYS)


def find(text: str, kind: str, folder: Path, instance: type | None = None) -> Any:
    """Returns the object that `text` names, without calling it: a function registered as `kind`, or an `instance`.

    Args:
        text: `path/to/file.py:name`, relative to `folder`, or `package.module:name`.

    Raises:
        ConfigError: no such file, module or name; the import raised; or the object is not registered.
    """
    target, _, name = text.rpartition(":")
    key, module = KEYS.get(kind, kind), _import(target, kind, folder)
    known = [n for n, v in vars(module).items() if _is_registered(v, kind, module, instance)]
    value = _attribute(module, text, kind, known)
    if _is_registered(value, kind, module, instance):
        return value
    (found_kind, owner), decorator = _mark(value), f"@sk.{kind}"
    rule = (f"an spmdkit.{instance.__name__} or " if instance is not None else "") + f"a function under {decorator}"
    what = f"is {_described(value)}" + (f" registered in {owner} with @sk.{found_kind or kind}" if owner else "")
    if found_kind == kind:
        repair = f"Name it where it is registered: {owner}:{name}"
    elif target.endswith(".py") and getattr(value, "__module__", None) == module.__name__ and callable(value):
        repair = f"Write {decorator} above its definition"
    else:
        repair = (
            f"Name one, such as {', '.join(known[:6])}"
            if known
            else f"Write one, in a file of yours: my_{kind}.py:{kind}"
        )
    raise ConfigError(f"{key}: {text} {what}. A config names objects that its module registers: {rule}. {repair}.")


def load(text: str, kind: str, folder: Path) -> Any:
    """Returns the object that `text` names on a command line, which need not be registered.

    Raises:
        ConfigError: no such file, module or name, or the import raised.
    """
    return _attribute(_import(text.rpartition(":")[0], kind, folder), text, kind, [])


def _attribute(module: ModuleType, text: str, kind: str, known: list[str]) -> Any:
    target, _, name = text.rpartition(":")
    if not hasattr(module, name):
        others = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        defines = f" It defines: {', '.join((known or others)[:12])}." if known or others else ""
        raise ConfigError(f"{KEYS.get(kind, kind)}: {target} has no '{name}'.{nearest(name, known or others)}{defines}")
    return getattr(module, name)


def named(requested: str | Mapping[str, Any], kind: str, folder: Path, returns: type[T]) -> T:
    """Returns the object of a config entry, `module:name` or `{module:name: options}`: an object of type `returns`, or
    the result of a function called with the options.

    Raises:
        ConfigError: the object is missing, not registered, not a `returns`, or does not accept the options.
    """
    text, options = (requested, {}) if isinstance(requested, str) else next(iter(requested.items()))
    key = KEYS.get(kind, kind)
    value = find(text, kind, folder, returns)
    if not isinstance(value, returns):
        return call_declared(value, text, kind, options or {}, returns, f"{key}: {text}")
    if options:
        raise ConfigError(
            f"{key}: {text} is a {kind}, and the options {sorted(options)} have no effect. Options are for a function "
            f"under @sk.{kind}. Write one with these arguments, or omit the options."
        )
    return value


def call_declared(fn: Any, text: str, kind: str, options: Mapping[str, Any], returns: type[T], options_key: str) -> T:
    """Returns `fn(**options)`, of type `returns`. `text` names `fn`; `options_key` is the config key of the options.

    Raises:
        ConfigError: the options do not match, the function raised, or its result has another type.
    """
    signature = inspect.signature(fn)
    known = list(signature.parameters)
    try:
        signature.bind(**options)
    except TypeError as error:
        if unknown := [name for name in options if name not in known]:
            hint = nearest(unknown[0], known) or f" It takes: {', '.join(known) or 'nothing'}."
        else:
            hint = f" Set {options_key}: {{{', '.join(f'{name}: ...' for name in known)}}}."
        raise ConfigError(
            f"{options_key} {dict(options)} do not fit {text}{signature}: {error}. They are passed as its "
            f"keyword arguments.{hint}"
        ) from None
    try:
        result = fn(**options)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise _incomplete_error(kind, f"{text}(...)", error) from error
    if not isinstance(result, returns):
        raise ConfigError(
            f"{KEYS.get(kind, kind)}: {text}(...) returned {type(result).__name__}. It must return an "
            f"spmdkit.{returns.__name__}. Write return sk.{returns.__name__}(...) at its end."
        )
    return result


def _mark(found: Any) -> tuple[str | None, str | None]:
    """Returns (kind, module) of a registered function. The registration of a class does not apply to subclasses."""
    mark: tuple[str | None, str | None] = getattr(found, "__dict__", {}).get(_MARK, (None, None))
    return mark


def _is_registered(found: Any, kind: str, module: ModuleType, instance: type | None) -> bool:
    """Returns whether `module` registers `found` as `kind`, or `found` is an `instance`."""
    return _mark(found) == (kind, module.__name__) or (instance is not None and isinstance(found, instance))


def _described(found: Any) -> str:
    if isinstance(found, type):
        return f"the class {_home(found)}.{found.__name__}"
    if callable(found):
        return f"a function{f' of {module}' if (module := _home(found)) else ''}"
    return type(found).__name__


def _home(found: Any) -> str:
    return str(getattr(found, "__module__", None) or "").removeprefix(_LOADED_AS)


def _import(target: str, kind: str, folder: Path) -> ModuleType:
    key = KEYS.get(kind, kind)
    if not target.endswith(".py"):
        try:
            with mesh_in_context(None):
                return importlib.import_module(target)
        except ModuleNotFoundError as error:
            if error.name and (target == error.name or target.startswith(error.name + ".")):
                raise ConfigError(
                    f"{key}: module '{target}' was not found. It must be importable, or a path that ends in .py. "
                    f"Try {target.replace('.', '/')}.py:NAME."
                ) from None
            raise ConfigError(_raised(kind, f"importing {target}", error)) from error
        except (Exception, SystemExit) as error:
            raise _incomplete_error(kind, f"importing {target}", error) from error
    path = (folder / target).resolve()
    if not path.is_file():
        siblings = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise ConfigError(
            f"{key}: file {path} does not exist. Paths are relative to the config's "
            f"folder.{nearest(path.name, siblings)}"
        )
    name = _LOADED_AS + path.stem
    before = sys.modules.get(name)
    if kind != "task" and before is not None and before.__file__ == str(path):
        return before  # a hook and the task may share a module: the file runs once
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module
    try:
        with mesh_in_context(None):
            spec.loader.exec_module(module)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise _incomplete_error(kind, f"importing {path}", error) from error
    cloudpickle.register_pickle_by_value(module)  # worker processes of streams and of grain cannot import its name
    return module


def _incomplete_error(kind: str, what: str, error: BaseException) -> SpmdkitError:
    """Returns the error of a module or a task that did not finish. A request to exit the process has code 70
    everywhere."""
    message = _raised(kind, what, error)
    return UserCodeError(message) if isinstance(error, SystemExit) else ConfigError(message)


def _raised(kind: str, what: str, error: BaseException) -> str:
    text, where = shortened(error).replace("Task.__init__()", "Task(...)"), ""
    if isinstance(error, SyntaxError) and error.filename:
        text, where = error.msg, f" at {error.filename}:{error.lineno}"
    elif (frame := user_frame(error)) is not None:
        where = f" at {frame.filename}:{frame.lineno}"
    key = KEYS.get(kind, kind)
    return f"{key}: {what} raised {type(error).__name__}{where}: {text}. It must run without an error. Fix that line."
